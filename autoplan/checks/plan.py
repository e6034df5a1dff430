"""Checks of a plan that comes from outside, against the model and the cluster; every other function trusts its plan.

A plan.json is only data, and somebody may have edited it: each number, name and layout is looked at before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from autoplan.analysis.captured import why_uncaptured
from autoplan.analysis.chunked_loss import can_chunk, why_whole
from autoplan.analysis.head_group import head_group
from autoplan.analysis.kept_attention import kinds_with_attention, recomputes_attention
from autoplan.analysis.semantics import check_loss_average, own_gradients
from autoplan.analysis.uncompiled import why_uncompiled
from autoplan.cost.boundaries import legal_cuts
from autoplan.cost.grad_compression import Compression
from autoplan.errors import InputError, PlanMismatchError, UsageError
from autoplan.graph import FAILS_SHARDED, GraphFacts, Op, OpGraph, Segment
from autoplan.hardware import HardwareProfile
from autoplan.hardware.cluster import Cluster, Hardware
from autoplan.layout import can_shard, conversion, parse_layout
from autoplan.options import BATCH_NORMS, GRAD_COMPRESSIONS, LOSS_AVERAGES, LOSSES, MEMORY_FORMATS, PRECISIONS
from autoplan.parallel_plan import ZERO_STAGES, Mesh, Plan, SegmentSharding, StagePlan
from autoplan.registry import load_table
from autoplan.rules import OpRule, load_rules, operand_names
from autoplan.schedules import schedule_of, splits_backward
from autoplan.search.meshes import MAX_SPLIT_ZERO_STAGE
from autoplan.tensor_parallel.sharding import read_sharding

COUNTS = ("pp", "dp", "tp", "zero_shard_degree", "micro_batch_size", "n_micro_batches", "n_chunks")


def precision_to_judge(plan: Plan, *, asked: str | None) -> str:
    """The precision that a given plan is judged in: its own; `asked` is None where none was asked for.

    Raises: UsageError where another was asked for.
    """
    _check_precision(plan)
    if asked not in (None, plan.precision):
        raise UsageError.of(
            "--precision",
            found=asked,
            expected=f"{plan.precision}, as the given plan has",
            fix="leave it out, or plan again with it",
        )
    return plan.precision


def check_plan(plan: Plan, graph: OpGraph, hardware: Hardware, *, rule_files: Sequence[str] = ()) -> None:
    """Return when `plan` is a plan for this model that this cluster, perhaps a mixed one, has the devices for.

    Raises: PlanMismatchError when it belongs to another model or needs more devices; InputError naming the field that
        is impossible.
    """
    if plan.graph_hash and plan.graph_hash != graph.content_hash():
        raise PlanMismatchError(
            "the plan was made for another model\n"
            "  expected: the same file, --set values and versions\n  fix: plan again for this one"
        )
    _check_mesh(plan.mesh)
    if plan.mesh.n_devices > hardware.n_devices:
        raise PlanMismatchError(
            f"the plan needs {plan.mesh.n_devices} devices, {hardware.name} has {hardware.n_devices}\n"
            "  fix: raise --hosts, or plan again"
        )
    _check_groups(plan, hardware.groups if isinstance(hardware, Cluster) else (), name=hardware.name)
    _check_precision(plan)
    if plan.batch_norm not in BATCH_NORMS:
        _refuse("batch_norm", plan.batch_norm, f"one of {', '.join(BATCH_NORMS)}")
    if plan.mesh.shares and plan.batch_norm != BATCH_NORMS[0]:
        _refuse("batch_norm", plan.batch_norm, f"{BATCH_NORMS[0]}, since ranks have different numbers of micro-batches")
    if plan.loss_average not in LOSS_AVERAGES:
        _refuse("loss_average", plan.loss_average, f"one of {', '.join(LOSS_AVERAGES)}")
    check_loss_average(graph, plan.loss_average)
    if plan.loss not in LOSSES:
        _refuse("loss", plan.loss, f"one of {', '.join(LOSSES)}")
    _check_compression(plan)
    if plan.mesh.memory_format not in MEMORY_FORMATS:
        _refuse("mesh.memory_format", plan.mesh.memory_format, f"one of {', '.join(MEMORY_FORMATS)}")
    if graph.is_module_level and plan.mesh.compile:
        _refuse("mesh.compile", plan.mesh.compile, "false, since operators inside of whole modules were not traced")
    if plan.mesh.compile and (why := why_uncompiled(graph)):
        _refuse("mesh.compile", True, f"false: found {why}")
    if plan.mesh.generated and plan.mesh.tp * plan.mesh.pp > 1:
        _refuse("mesh.generated", True, "false with tp or pp above 1, whose programs are always generated")
    if plan.mesh.wraps_head and (plan.mesh.needs_generated_model or not head_group(graph)):
        expected = "false where the program is generated, or no module behind the blocks may be a group of its own"
        _refuse("mesh.wraps_head", True, expected)
    if plan.mesh.needs_generated_model and graph.has_own_gradients:
        _refuse("mesh", plan.mesh, f"tp 1, pp 1 and generated false, since the model has {own_gradients(graph)}")
    if graph.replaces_weights and not graph.is_module_level and not plan.mesh.needs_generated_model:
        _refuse("mesh.generated", False, "true, since the model calls modules by torch.func.functional_call")
    if plan.mesh.zero_stage and FAILS_SHARDED in graph.dissolved:
        expected = "0, since the optimizer of build_optimizer fails on torch's distributed tensors"
        _refuse("mesh.zero_stage", plan.mesh.zero_stage, expected)
    _check_stages(plan.stages, plan.mesh, graph)
    _check_kept_attention(plan, graph, hardware)
    _check_split_backward(plan)
    _check_captured(plan, graph, hardware)
    rules = load_rules(rule_files)
    _check_shardings(plan, graph, rules)
    if plan.loss == "chunked" and not can_chunk(graph, plan.mesh, plan.shardings, rules=rules):
        _refuse("loss", plan.loss, f'"whole": found {why_whole(graph) or "a layout or compiled part in its way"}')


def _check_kept_attention(plan: Plan, graph: OpGraph, hardware: Hardware) -> None:
    device = (hardware.groups[0] if isinstance(hardware, Cluster) else hardware).device
    kinds = kinds_with_attention(graph, precision=plan.precision, attention=device.attention)
    recomputed = [index for stage in plan.stages for index in stage.recomputed]
    if plan.mesh.keeps_attention and not recomputes_attention(graph, kinds, recomputed):
        expected = "false, since no block is recomputed that has attention which torch runs as one kernel"
        _refuse("mesh.keeps_attention", True, expected)


def _check_captured(plan: Plan, graph: OpGraph, hardware: Hardware) -> None:
    device = (hardware.groups[0] if isinstance(hardware, Cluster) else hardware).device
    why = why_uncaptured(
        graph,
        precision=plan.precision,
        grad_compression=plan.grad_compression,
        is_cpu=device.is_cpu,
        tp=plan.mesh.tp,
        recomputes=any(stage.recomputed for stage in plan.stages),
        schedule=plan.mesh.schedule,
        has_shares=bool(plan.mesh.shares),
    )
    if plan.mesh.cuda_graph and why:
        _refuse("mesh.cuda_graph", True, f"false: found {why}")


def _check_compression(plan: Plan) -> None:
    name, rank = plan.grad_compression, plan.powersgd_rank
    if name != "none" and plan.mesh.shares:
        _refuse("grad_compression", name, "none, since gradients are summed over groups of hosts")
    if name not in GRAD_COMPRESSIONS:
        _refuse("grad_compression", name, f"one of {', '.join(GRAD_COMPRESSIONS)}")
    if (rank is not None) != (name == "powersgd") or (rank is not None and rank < 1):
        _refuse("powersgd_rank", rank, "1 or more with grad_compression powersgd, else null")
    if name != "none" and Compression(name, rank).under(plan.mesh).name == "none":
        expected = f"none with dp {plan.mesh.dp}, ZeRO {plan.mesh.zero_stage} over {plan.mesh.zero_shard_degree} ranks"
        _refuse("grad_compression", name, expected)
    if name == "powersgd" and plan.precision == "fp16":
        _refuse("precision", plan.precision, "another with grad_compression powersgd")


def _check_groups(plan: Plan, groups: tuple[HardwareProfile, ...], *, name: str) -> None:
    """The groups of a mixed cluster; `groups` is empty where there is one kind of host."""
    if bool(plan.groups) != bool(groups):
        kind = "a mixed cluster" if plan.groups else "one kind of host"
        raise PlanMismatchError(f"the plan was made for {kind}, {name} is another\n  fix: plan again for {name}")
    if not groups:
        return
    mesh, indices = plan.mesh, [own.group for own in plan.groups]
    if mesh.shares and len(mesh.shares) != len(indices):
        _refuse("mesh.shares", f"{len(mesh.shares)} of them", f"one for each of the {len(indices)} groups")
    if len(set(indices)) != len(indices) or not set(indices) <= set(range(len(groups))):
        _refuse("groups", indices, f"different ones among 0 to {len(groups) - 1}, the groups of {name}")
    counts = [own.n_ranks for own in plan.groups]
    if mesh.shares and counts != [mesh.pp] * len(counts):
        _refuse("groups", counts, f"pp, which is {mesh.pp}, for each share of the batch")
    if not mesh.shares and (min(counts) < 1 or sum(counts) != mesh.pp):
        _refuse("groups", counts, f"1 rank or more each, together pp, which is {mesh.pp}")
    if len(indices) > 1 and mesh.n_chunks > 1:
        _refuse("mesh.n_chunks", mesh.n_chunks, "1, since the pipeline is on several groups")
    for own, n_devices in zip(plan.groups, plan.n_devices_of_groups, strict=True):
        group = groups[own.group]
        if own.hardware != group.name or n_devices > group.n_devices:
            raise PlanMismatchError(
                f"the plan needs {n_devices} devices of {own.hardware} in group {own.group} of {name},"
                f" which has {group.n_devices} of {group.name}\n  fix: raise n_hosts in the file, or plan again"
            )


def _check_precision(plan: Plan) -> None:
    if plan.precision not in PRECISIONS:
        _refuse("precision", plan.precision, f"one of {', '.join(PRECISIONS)}")


def _check_mesh(mesh: Mesh) -> None:
    for name in COUNTS:
        if getattr(mesh, name) < 1:
            _refuse(f"mesh.{name}", getattr(mesh, name), "at least 1")
    if mesh.shares:
        _check_shares(mesh)
    if mesh.zero_stage not in ZERO_STAGES:
        _refuse("mesh.zero_stage", mesh.zero_stage, "0, 1, 2 or 3")
    if mesh.dp % mesh.zero_shard_degree != 0:
        _refuse("mesh.zero_shard_degree", mesh.zero_shard_degree, f"a divisor of dp, which is {mesh.dp}")
    if (mesh.zero_stage == 0) != (mesh.zero_shard_degree == 1):
        _refuse(
            "mesh.zero_shard_degree", mesh.zero_shard_degree, f"1 exactly when zero_stage is 0, not {mesh.zero_stage}"
        )
    names = sorted(load_table("autoplan.schedules", "SCHEDULES"))
    if mesh.schedule not in names:
        _refuse("mesh.schedule", mesh.schedule, f"one of {', '.join(names)}")
    if mesh.pp == 1 and mesh.n_chunks != 1:
        _refuse("mesh.n_chunks", mesh.n_chunks, "1, since pp is 1")
    if mesh.pp > 1:
        schedule_of(mesh)


def _check_shares(mesh: Mesh) -> None:
    for index, share in enumerate(mesh.shares):
        for name in ("dp", "micro_batch_size", "n_micro_batches"):
            if getattr(share, name) < 1:
                _refuse(f"mesh.shares[{index}].{name}", getattr(share, name), "at least 1")
        if share.dp % mesh.zero_shard_degree != 0:
            expected = f"a multiple of zero_shard_degree, which is {mesh.zero_shard_degree}"
            _refuse(f"mesh.shares[{index}].dp", share.dp, expected)
    if len(mesh.shares) < 2 or mesh.dp != sum(share.dp for share in mesh.shares):
        _refuse("mesh.shares", [share.dp for share in mesh.shares], f"two or more, together dp, which is {mesh.dp}")
    first = mesh.shares[0]
    if (mesh.micro_batch_size, mesh.n_micro_batches) != (first.micro_batch_size, first.n_micro_batches):
        found = f"{mesh.micro_batch_size} x {mesh.n_micro_batches}"
        _refuse("mesh", found, f"the micro-batches of shares[0], {first.micro_batch_size} x {first.n_micro_batches}")
    if mesh.pp > 1:
        _refuse("mesh.pp", mesh.pp, "1, since ranks have different numbers of micro-batches")


def _check_stages(stages: tuple[StagePlan, ...], mesh: Mesh, graph: OpGraph) -> None:
    n_segments, cuts = len(graph.segments), legal_cuts(graph)
    if mesh.shares:
        _check_stages_of_shares(stages, mesh, graph)
        return
    if len(stages) != mesh.n_stages:
        _refuse("stages", f"{len(stages)} of them", f"{mesh.n_stages}, which is pp x n_chunks")
    start = 0
    for index, stage in enumerate(stages):
        if stage.start != start:
            _refuse(f"stages[{index}].start", stage.start, f"{start}, where the stage before it ends")
        if not start < stage.stop <= n_segments:
            _refuse(f"stages[{index}].stop", stage.stop, f"{start + 1} to {n_segments}, the segments of the model")
        if start > 0 and not cuts[start - 1]:
            _refuse(f"stages[{index}].start", start, "a boundary at which the pipeline can be cut")
        for segment in stage.recomputed:
            if not (start <= segment < stage.stop and graph.segments[segment].is_block):
                _refuse(f"stages[{index}].recomputed", segment, f"blocks among segments {start} to {stage.stop - 1}")
        start = stage.stop
    if start != n_segments:
        _refuse(f"stages[{len(stages) - 1}].stop", start, f"{n_segments}, the end of the model")


def _check_stages_of_shares(stages: tuple[StagePlan, ...], mesh: Mesh, graph: OpGraph) -> None:
    if len(stages) != len(mesh.shares):
        _refuse("stages", f"{len(stages)} of them", f"{len(mesh.shares)}, one for each of mesh.shares")
    for index, stage in enumerate(stages):
        try:
            _check_stages((stage,), mesh.of_share(index), graph)
        except InputError as error:
            raise InputError(f"plan: of mesh.shares[{index}]\n{error}") from error


def _check_split_backward(plan: Plan) -> None:
    mesh = plan.mesh
    if not splits_backward(mesh.schedule) or mesh.pp == 1:
        return
    reason = f'with schedule "{mesh.schedule}", whose backward pass is split'
    if mesh.compile:
        _refuse("mesh.compile", mesh.compile, f"false {reason}")
    if mesh.zero_stage > MAX_SPLIT_ZERO_STAGE:
        _refuse("mesh.zero_stage", mesh.zero_stage, f"0 to {MAX_SPLIT_ZERO_STAGE} {reason}")
    for index, stage in enumerate(plan.stages):
        if stage.recomputed:
            _refuse(f"stages[{index}].recomputed", stage.recomputed, f"nothing {reason}")


def _check_shardings(plan: Plan, graph: OpGraph, rules: Mapping[str, OpRule]) -> None:
    if graph.is_module_level and plan.mesh.tp > 1:
        _refuse("mesh.tp", plan.mesh.tp, "1, since whole modules are planned, and nothing inside them is split")
    if plan.mesh.tp == 1:
        if plan.shardings or plan.mesh.sharding:
            _refuse("shardings", plan.mesh.sharding or "some", "none, since tp is 1")
        return
    if plan.mesh.sharding:
        _check_layout("mesh.sharding", plan.mesh.sharding)
    first, facts = graph.first_of_kind(), GraphFacts.of(graph)
    kinds = [assignment.kind for assignment in plan.shardings]
    if sorted(kinds) != sorted(first):
        _refuse("shardings", f"kinds {kinds}", f"one for each segment kind: {sorted(first)}")
    for assignment in plan.shardings:
        _check_assignment(assignment, graph, facts, first[assignment.kind], degree=plan.mesh.tp, rules=rules)


def _check_assignment(
    assignment: SegmentSharding,
    graph: OpGraph,
    facts: GraphFacts,
    segment: Segment,
    *,
    degree: int,
    rules: Mapping[str, OpRule],
) -> None:
    where = f"shardings of {segment.name}"
    ops = {op.name: op for op in graph.ops_of(segment)}
    needed = {*segment.inputs, *segment.parameters, *ops}
    given = [name for name, _ in assignment.values]
    if sorted(given) != sorted(needed):
        wrong = sorted({*given} ^ needed) or sorted(given)
        _refuse(f"{where}: values", ", ".join(wrong), "each input, parameter and op of the segment once")
    for name, text in assignment.values:
        _check_layout(f"{where}: {name}", text)
        if not can_shard(facts.specs[name], parse_layout(text), degree):
            _refuse(f"{where}: {name}", text, f"a dim of it that divides by tp, which is {degree}")
    for op, argument, text in assignment.uses:
        read = _value_read(op, argument, ops, segment)
        if read is None:
            _refuse(f"{where}: uses", f"{op}, {argument}", "an op of the segment and the position of an operand")
        _check_layout(f"{where}: {op}, {argument}", text)
        produced, wanted = parse_layout(dict(assignment.values)[read]), parse_layout(text)
        is_possible = conversion(produced, wanted, has_gradient=read in facts.gradients) is not None
        if not (is_possible and can_shard(facts.specs[read], wanted, degree)):
            _refuse(f"{where}: {op}, {argument}", text, f"a layout that {read}, {produced}, can be turned into")
    try:
        read_sharding(graph, segment, assignment, degree=degree, rules=rules, facts=facts)
    except StopIteration:
        _refuse(where, "layouts that no rule allows together", "for each op a strategy of its rule")


def _value_read(op: str, argument: str, ops: Mapping[str, Op], segment: Segment) -> str | None:
    """The value whose layout a use changes: that operand of the op, or, for op "", an output of the segment."""
    if op == "":
        return argument if argument in segment.outputs else None
    names = operand_names(ops[op]) if op in ops else ()
    return names[int(argument)] if argument.isdecimal() and int(argument) < len(names) else None


def _check_layout(where: str, text: str) -> None:
    try:
        layout = parse_layout(text)
    except AssertionError:
        layout = None
    if layout is None or layout.blocks < 1:
        _refuse(where, text, "a layout: R, V, P, S(0), S(1), S(0+), or S(0/3)")


def _refuse(where: str, found: object, expected: str) -> NoReturn:
    raise InputError.of(f"plan: {where}", found=found, expected=expected, fix="make the plan again, do not edit it")
