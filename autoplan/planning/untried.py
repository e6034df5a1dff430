"""What might make a plan faster or smaller and was not looked at, in plain sentences for the report."""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.analysis.chunked_loss import why_whole
from autoplan.analysis.uncompiled import why_uncompiled
from autoplan.cost.boundaries import legal_cuts, why_uncut
from autoplan.graph import DIFFERS_SHARDED, FAILS_SHARDED, WHOLE_OPTIMIZER, OpGraph, is_convolution
from autoplan.measured_profile.segment_times import MeasuredProfile
from autoplan.parallel_plan import Execution, Mesh
from autoplan.rules import OpRule, forward_flops, operand_names
from autoplan.space.layouts import layout_size, too_many_layouts

MANY_CLASSES = 2**14  # from here on logits are a large part of what a model with attention keeps
QUITE_ANOTHER = 4  # times as large
COMPUTED_COMPILE = (
    "What torch.compile gains is computed, and whether it can compile this model was not tried: autoplan profile MODEL"
    " --compile both measures it on one device; --fix compile=off plans without it."
)
_CROSS_ENTROPY = "aten.cross_entropy_loss.default"


def untried(
    graph: OpGraph,
    measured: MeasuredProfile | None,
    *,
    rules: Mapping[str, OpRule],
    compiles: bool,
    looks_for_layouts: bool,
    mesh: Mesh | None = None,
    fixes_micro_batch: bool = False,
) -> tuple[str, ...]:
    """One sentence for each.

    `compiles`: the plan has compiled blocks; `looks_for_layouts`: no tp is fixed; `mesh`: that of the plan.
    """
    compiled = COMPUTED_COMPILE if compiles and measured is None else ""
    found = (
        _channels_last(graph, measured, rules),
        _chunked_loss(graph),
        _uncut(graph),
        _unsplit(graph, rules) if looks_for_layouts else "",
        "" if mesh is None or fixes_micro_batch else _layouts_of_others(mesh),
        compiled,
        _uncompiled(graph),
    )
    return tuple(sentence for sentence in found if sentence)


def undivided(graph: OpGraph, *, fix: Mapping[str, str]) -> tuple[str, ...]:
    """Why parameters are not divided, by ZeRO or tensor parallelism, where the optimizer needs them whole."""
    optimizer, found = "the optimizer of build_optimizer", []
    fixes_zero = "zero" in fix or "shard" in fix
    if FAILS_SHARDED in graph.dissolved and not fixes_zero:
        found.append(
            f"ZeRO 1 to 3 were left out, as {optimizer} fails on the distributed tensors that these give it, or takes"
            " numbers of them (.item()) that differ between ranks; it gets whole tensors."
        )
    if DIFFERS_SHARDED in graph.dissolved and not fixes_zero:
        found.append(
            f"ZeRO 1 to 3 were left out, as {optimizer} updates the distributed tensors that these give it otherwise"
            " than whole ones; --fix zero=1, 2 or 3 plans so all the same."
        )
    may_split = not graph.is_module_level and not graph.has_own_gradients
    if WHOLE_OPTIMIZER in graph.dissolved and may_split and "tp" not in fix:
        found.append(
            f"Tensor parallelism was left out, as {optimizer} computes with whole tensors (norms, products), of which"
            " ranks would have parts; --fix tp=2 plans so all the same."
        )
    return tuple(found)


def _channels_last(graph: OpGraph, measured: MeasuredProfile | None, rules: Mapping[str, OpRule]) -> str:
    """Where most arithmetic is convolutions, and contiguous images alone were measured."""
    if measured is None or any(way.memory_format != Execution().memory_format for way in measured.executions):
        return ""
    n_flops, total = 0, 0
    specs = graph.specs()
    for op in graph.ops:
        rule = rules.get(op.target)
        if rule is not None and rule.efficiency == "matmul":
            flops = forward_flops(rule, op, operands=tuple(specs[name] for name in operand_names(op)), batch_size=1)
            total += flops
            n_flops += flops if is_convolution(op) else 0
    if 2 * n_flops <= total:
        return ""
    return (
        "Most of the arithmetic is convolutions, which often run faster on images in channels_last: beside contiguous"
        " images that were measured, they must be too, by autoplan profile MODEL --memory-format both on one device."
    )


def _unsplit(graph: OpGraph, rules: Mapping[str, OpRule]) -> str:
    """Where a block has too many operators."""
    is_left_out = graph.has_own_gradients or WHOLE_OPTIMIZER in graph.dissolved
    n_ops = 0 if is_left_out else too_many_layouts(graph, rules)
    if not n_ops:
        return ""
    return (
        f"How to split tensors was not looked for, as a block has {n_ops} operators (a loop over tokens?): --fix tp=2"
        " does it, in minutes."
    )


def _layouts_of_others(mesh: Mesh) -> str:
    """Where tensor parallelism was solved for micro-batches of quite another size."""
    own, solved = mesh.micro_batch_size, layout_size(mesh.micro_batch_size)
    if mesh.tp == 1 or own < QUITE_ANOTHER * solved:
        return ""
    return (
        f"How tensors are split was solved for micro-batches of {solved}, and the plan has {own}:"
        f" --fix micro_batch={own} solves it for these, which may be faster by more than the gap."
    )


def _uncut(graph: OpGraph) -> str:
    """Where an output of the model is made early."""
    why = why_uncut(graph)
    return f"A pipeline has at most {1 + sum(legal_cuts(graph))} stages: {why}." if why else ""


def _uncompiled(graph: OpGraph) -> str:
    """Where torch would compile blocks wrongly."""
    why = why_uncompiled(graph)
    return f"Nothing is compiled, as torch would get it wrong: the model has {why}." if why else ""


def _chunked_loss(graph: OpGraph) -> str:
    """Where the logits are large."""
    specs, why = graph.specs(), why_whole(graph)
    n_classes = [specs[op.input_names()[0]].shape[-1] for op in graph.ops if op.target == _CROSS_ENTROPY]
    if not why or not any(isinstance(n, int) and n >= MANY_CLASSES for n in n_classes):
        return ""
    return f"The loss is computed whole: to compute it in slices of its rows is not possible here, which has {why}."
