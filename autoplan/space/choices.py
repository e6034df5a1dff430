"""What the options fix of a plan, and what they leave to the search: loss, compression, how modules run, attention."""

from __future__ import annotations

from functools import partial

from autoplan.analysis.attention_kernel import scattered_masks
from autoplan.analysis.captured import why_uncaptured
from autoplan.analysis.executions import execution_of
from autoplan.analysis.kept_attention import kinds_with_attention
from autoplan.analysis.uncompiled import why_uncompiled
from autoplan.cost.grad_compression import Compression
from autoplan.errors import UsageError
from autoplan.graph import DIFFERS_SHARDED, FAILS_SHARDED, OpGraph
from autoplan.hardware import Device
from autoplan.measured_profile.segment_times import MeasuredProfile
from autoplan.options import (
    BATCH_NORMS,
    DEFAULT_POWERSGD_RANK,
    GRAD_COMPRESSIONS,
    LOSSES,
    MEMORY_FORMATS,
    PLAIN_SCHEDULE,
    Options,
)
from autoplan.parallel_plan import ZERO_STAGES, Execution
from autoplan.schedules import splits_backward
from autoplan.search.meshes import Captures, fixed, fixed_int

CHANNELS_LAST = MEMORY_FORMATS[1]
NO_IMAGES = "no segment that reads images, [sample, channel, height, width]"


def loss_choice(options: Options) -> str | None:
    """How the loss is computed, or None where the search may choose.

    It chooses as it does of what is recomputed; so recomputation of some blocks, when fixed, says nothing of the loss.
    """
    return fixed(options, "loss") or (LOSSES[0] if fixed(options, "recompute") == "selective" else None)


def compression_choice(options: Options) -> Compression:
    """How gradients are compressed, which only the user decides."""
    name = fixed(options, "grad_compression") or GRAD_COMPRESSIONS[0]
    rank = fixed_int(options, "powersgd_rank") or DEFAULT_POWERSGD_RANK
    return Compression(name, rank if name == "powersgd" else None)


def zero_stages(graph: OpGraph, options: Options) -> tuple[int, ...]:
    """ZeRO stages that plans may have.

    None divides parameters where the optimizer fails on distributed tensors, nor, unless ZeRO is fixed, where it
    updates them otherwise than whole ones.
    """
    is_asked = fixed(options, "zero") is not None or fixed(options, "shard") is not None
    is_left_out = FAILS_SHARDED in graph.dissolved or (DIFFERS_SHARDED in graph.dissolved and not is_asked)
    return ZERO_STAGES[:1] if is_left_out else ZERO_STAGES


def default_batch_norm(graph: OpGraph) -> str:
    """Whose statistics BatchNorm takes unless the user fixes it: as the user's own model does."""
    return BATCH_NORMS[graph.synchronizes_batch_norm]


def executions(
    graph: OpGraph, options: Options, measured: MeasuredProfile | None, *, device: Device
) -> tuple[Execution, ...]:
    """How modules may run: as is fixed, and else in every way that has a price (`why_unknown`).

    Without measurements nothing is compiled unless it is asked for on a CPU, since what it gains is computed for GPUs,
    or where the graph does not hold all that runs: whole modules, gradients of the user's own. What torch compiles
    wrongly (`why_uncompiled`) never is, which `checks.fixes` refuses.

    Raises: UsageError when a way is asked for that has no price.
    """
    compiles, memory_format, tp = fixed(options, "compile"), fixed(options, "memory_format"), fixed_int(options, "tp")
    if compiles == "on":
        check_execution(graph, measured, Execution(compile=True), where="--fix compile=on", degree=tp)
    if memory_format == CHANNELS_LAST:
        wanted = Execution(memory_format=CHANNELS_LAST)
        check_execution(graph, measured, wanted, where=f"--fix memory_format={CHANNELS_LAST}", degree=tp)
    is_unknown = device.is_cpu or graph.is_module_level or graph.has_own_gradients
    either = (False,) if (measured is None and is_unknown) or why_uncompiled(graph) else (False, True)
    found = [
        Execution(is_compiled, layout)
        for is_compiled in (either if compiles is None else (compiles == "on",))
        for layout in (MEMORY_FORMATS if memory_format is None else (memory_format,))
    ]
    return tuple(way for way in found if not why_unknown(graph, measured, way, degree=tp)) or tuple(found[:1])


def attention_choices(graph: OpGraph, options: Options, *, device: Device) -> tuple[bool, ...]:
    """Whether recomputation may keep attention: as is fixed, and else where there is any to keep.

    Fixed on, it is kept wherever blocks are recomputed; a plan that recomputes none has nothing to keep.

    Raises: UsageError when it is to be kept and cannot be.
    """
    wanted, recompute, schedule = fixed(options, "keep_attention"), fixed(options, "recompute"), _schedule(options)
    has_any = bool(kinds_with_attention(graph, precision=options.precision, attention=device.attention))
    cannot = recompute == "none" or (schedule != "" and splits_backward(schedule))
    if wanted == "on" and not (has_any and not cannot):
        found = "no block with attention that torch runs as one kernel"
        if has_any:
            found = "recompute=none" if recompute == "none" else f"schedule={schedule}, which recomputes nothing"
        raise UsageError.of(
            "--fix keep_attention=on",
            found=found,
            expected="blocks that call F.scaled_dot_product_attention, and a plan that may recompute them",
            fix="leave keep_attention out",
        )
    if wanted is not None:
        return (wanted == "on",)
    return (False, True) if has_any and not cannot else (False,)


def _schedule(options: Options) -> str:
    """The one that is fixed; "" where there is a choice."""
    schedule = fixed(options, "schedule")
    return "" if schedule in (None, PLAIN_SCHEDULE) else schedule


def capture_choices(graph: OpGraph, options: Options, *, device: Device) -> Captures:
    """Whether passes may, or must, be a CUDA graph.

    It is as fixed. Else, where they can be, plans have one or do without, since it needs more memory.

    Raises: UsageError when a graph is asked for and cannot be.
    """
    wanted, is_cut = fixed(options, "cuda_graph"), fixed(options, "pp") not in (None, "1")
    why_not = partial(
        why_uncaptured,
        graph,
        precision=options.precision,
        grad_compression=compression_choice(options).name,
        is_cpu=device.is_cpu,
        recomputes=fixed(options, "recompute") in ("full", "selective"),
        schedule=_schedule(options) if is_cut else "",
    )
    of_own, of_generated, of_shards = why_not(runs_own_modules=True), why_not(), why_not(tp=2)
    found = of_generated if fixed(options, "tp") in (None, "1") else of_shards
    is_whole = (fixed(options, "tp"), fixed(options, "pp")) == ("1", "1")
    if graph.has_own_gradients or (fixed(options, "generated") == "off" and is_whole):
        found = found or of_own
    if wanted == "on" and found:
        raise UsageError.of(
            "--fix cuda_graph=on",
            found=found,
            expected="passes of which nothing changes from step to step, and in which the host waits for nothing",
            fix="leave generated=off out, as code generated from the trace does not wait, or cuda_graph=on"
            if found == of_own != of_generated and not graph.has_own_gradients
            else "leave cuda_graph out",
        )
    either = (wanted == "on",) if wanted else (True, False)
    none = () if wanted == "on" else (False,)
    return Captures(*(none if why else either for why in (of_own, of_generated, of_shards)))


def codes(
    graph: OpGraph, options: Options, measured: MeasuredProfile | None, *, captures: Captures, device: Device
) -> tuple[bool, ...]:
    """Whether programs may be generated where the user's own classes would do: as is fixed, else if it may gain.

    A CUDA graph gains that only generated code can be. Where no block was measured both ways, the only other gain known
    is that of masks, which generated code makes dense.
    """
    wanted = fixed(options, "generated")
    if wanted is not None:
        return (wanted == "on",)
    if graph.replaces_weights and not graph.is_module_level:
        return (True,)
    may_gain = None if measured is None else measured.is_worth_generating
    if may_gain is None:
        may_gain = bool(scattered_masks(graph)) and not device.is_cpu
    may_gain |= True in captures.generated and True not in captures.own
    return (False, True) if may_gain and not graph.has_own_gradients else (False,)


def why_unknown(graph: OpGraph, measured: MeasuredProfile | None, way: Execution, *, degree: int | None) -> str:
    """Why there is no price for modules that run so, at this degree or any; "" when there is one.

    What torch.compile gains, and images in channels_last, are priced from the data sheet as well, but not beside what
    was measured in eager mode, and of contiguous images.
    """
    plain, kinds = Execution(), graph.first_of_kind()
    used = {execution_of(graph, kind, way) for kind in kinds}
    needed = used - {plain}
    name = "compiled" if way.compile else f"in {way.memory_format}"
    if way.memory_format not in {item.memory_format for item in used}:
        return NO_IMAGES
    if measured is None:
        return ""
    if not needed <= measured.executions:
        return f"no segment that was measured {name}"
    failed = (item for item in measured.failed if item.execution in needed)
    texts = dict.fromkeys(f"{item.segment} (tp {item.tp})" for item in failed if degree in (None, item.tp))
    action = "torch.compile failed on" if way.compile else f"measurements {name} that failed of"
    return f"{action} {', '.join(texts)}" if texts else ""


def check_execution(
    graph: OpGraph, measured: MeasuredProfile | None, way: Execution, *, where: str, degree: int | None
) -> None:
    """Return when modules that run so have a price; raises UsageError naming `where` it was asked for."""
    why = why_unknown(graph, measured, way, degree=degree)
    if why == NO_IMAGES:
        raise UsageError.of(where, found=why, expected="a model with convolutions", fix="leave memory_format out")
    if why:
        option, plain = ("--compile", "compile") if way.compile else ("--memory-format", "memory_format")
        raise UsageError.of(
            where,
            found=why,
            expected="--profile FILE with segments that ran so, to set beside those that were measured",
            fix=f"run autoplan profile MODEL {option} both, or leave {plain} or --profile out",
        )
