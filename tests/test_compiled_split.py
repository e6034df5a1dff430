"""What compiled blocks are said to keep, against what torch's partitioner keeps of the generated classes.

They are partitioned as on a GPU, with the decompositions of its compiler, and run op by op.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.families import FAMILIES
from distributed.launch import run_ranks
from distributed.programs import MODELS, graph_of, make_plan, shardings_of
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from autoplan.codegen.segment_modules import segment_modules
from autoplan.cost.compiled_work import compiled_passes, compiled_segment
from autoplan.cost.fusions import fused_segment
from autoplan.cost.local_segment import local_segment
from autoplan.cost.work_context import work_contexts
from autoplan.graph import COMPUTE, GraphFacts, extent_at
from autoplan.hardware import load_hardware_profile
from autoplan.layout import Layout, local_spec
from autoplan.rules import load_rules
from autoplan.runtime import Config
from autoplan.runtime.alone import join_alone
from autoplan.tensor_parallel.sharding import read_sharding

BATCH, TP = 4, 2
WIDE = {"n_layers": 2, "n_heads": 8, "width": 256, "context": 128, "vocabulary": 64}
MODELS["llama_wide"] = ("llama.py", {"n_kv_heads": 4, "hidden": 768, **WIDE})
# Loops of hundreds of operators; attention with a bias that learns, which a CPU has no kernel of its own for; an
# operator that its model file registers.
LEFT_OUT = {"lstm", "state_space", "t5_hf", "custom_op"}
Given = tuple[tuple[int, ...], torch.dtype, bool, bool]  # shape, dtype, has a gradient, is invariant


@pytest.mark.parametrize("sharding", ["R", "S(1)"])
def test_split_blocks_keep_what_torch_keeps(tmp_path: Path, sharding: str) -> None:
    ((priced, by_torch),) = _kept("llama_wide", sharding, tmp_path)
    assert priced == pytest.approx(by_torch, rel=0.01)


@pytest.mark.nightly
@pytest.mark.parametrize("model", sorted(set(FAMILIES.values()) - LEFT_OUT))
def test_split_blocks_of_all_families_keep_little_more_than_is_priced(tmp_path: Path, model: str) -> None:
    for sharding in shardings_of(model, TP):
        for priced, by_torch in _kept(model, sharding, tmp_path):
            assert priced >= 0.95 * by_torch, sharding


def _kept(model: str, sharding: str, folder: Path) -> list[tuple[int, int]]:
    """Bytes that each kind of block keeps, priced and by torch."""
    graph, rules = graph_of(model), load_rules()
    plan = replace(make_plan(model, tp=TP, sharding=sharding), precision="bf16")
    text, classes = segment_modules(graph, plan, rules=rules)
    module = f"blocks_{model}_{sharding[0]}"
    (folder / f"{module}.py").write_text(text.replace("from runtime.", "from autoplan.runtime."))
    context = work_contexts(graph, load_hardware_profile("h200_x4"), "bf16", rules)(TP)
    assignments = {assignment.kind: assignment for assignment in plan.shardings}
    priced, described = [], []
    for kind, segment in graph.first_of_kind().items():
        if segment.is_block:
            layouts = read_sharding(graph, segment, assignments[kind], degree=TP, rules=rules, facts=context.facts)
            local = local_segment(context, segment, layouts)
            block = compiled_segment(context, local, fused_segment(context, segment, local))
            priced.append(compiled_passes(context, block, BATCH).saved_bytes)
            given = [_given(context.facts, name, layout) for name, layout in classes[kind].arguments]
            described.append((classes[kind].name, given))
    (by_torch,) = run_ranks(_kept_by_torch, 1, str(folder), module, described, backend="")
    return list(zip(priced, by_torch, strict=True))


def _given(facts: GraphFacts, name: str, layout: Layout) -> Given:
    spec = local_spec(facts.specs[name], layout, TP)
    shape = tuple(extent_at(extent, BATCH) for extent in spec.shape)
    dtype = torch.bfloat16 if spec.dtype == COMPUTE else getattr(torch, spec.dtype)
    return shape, dtype, dtype.is_floating_point and name in facts.gradients, name in facts.invariant


def _kept_by_torch(folder: str, module: str, described: list[tuple[str, list[Given]]]) -> list[int]:
    """Of each class, without its parameters, its buffers and what is the same in every micro-batch."""
    sys.path.insert(0, folder)
    join_alone(0, config=Config(tp=TP))
    return [_kept_by(getattr(importlib.import_module(module), name), given) for name, given in described]


def _kept_by(block_class: Any, given: list[Given]) -> int:
    with torch.device("meta"):
        block = block_class(dist.group.WORLD)
    block = block.to_empty(device="cpu").bfloat16()
    inputs, others = [], [*block.parameters(), *block.buffers()]
    for tensor in others:
        tensor.data.fill_(0.02)
    for shape, dtype, has_gradient, is_invariant in given:
        inputs.append(torch.ones(shape, dtype=dtype).requires_grad_(has_gradient))
        others += [inputs[-1]] if is_invariant else []
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = torch.compile(block.forward, dynamic=False, backend=_as_on_a_gpu())(*inputs)
    del outputs
    return sum(kept.values()) - sum(kept.get(place, 0) for place in {t.untyped_storage().data_ptr() for t in others})


def _as_on_a_gpu() -> Any:
    """Decomposed and partitioned as torch's compiler does it, and then run op by op."""

    def as_it_is(graph: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=as_it_is,
        bw_compiler=as_it_is,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
