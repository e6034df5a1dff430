"""A search result becomes an answer: what it is about, what its plan splits, and what that changes in the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.analysis.mixed_operands import fails_in_float64
from autoplan.analysis.semantics import notes
from autoplan.answers.answer import Answer, Request, Workload, WorkloadGroup, tokens_per_sample
from autoplan.hardware.cluster import Cluster, device_names, kinds_of, mean_price_usd_per_device_hour
from autoplan.hardware.usual import unusual_of
from autoplan.parallel_plan import Mesh
from autoplan.plain_text import count
from autoplan.planning.problem import global_batch_size
from autoplan.search.meshes import data_parallel_degrees, nearest_shared_batch
from autoplan.search.result import SearchResult
from autoplan.tensor_parallel.split_names import splits

if TYPE_CHECKING:
    from autoplan.graph import OpGraph, Segment
    from autoplan.hardware import HardwareProfile
    from autoplan.planning.problem import Problem

N_MODULES = 3  # of a segment between blocks, shown
MODULE_LEVEL_LIMITS = (
    "planned at module level: data parallelism, ZeRO and recomputation; no tensor or pipeline parallelism, because the"
    " operators inside of modules and the values between them were not traced",
    "all parameters are gathered and reduced at once, since each rank may use others",
    "times and memory are those of the ways that two small runs took through the model",
)


def answer_of(problem: Problem, result: SearchResult) -> Answer:
    """The result with what it is about, and what there is to say of its plan."""
    request = _request(problem)
    if result.best is None:
        return Answer(_workload(problem, compiles=False), result, request=request)
    graph, plan = problem.graph, result.best.plan
    is_searched = result.status != "given"
    workload = _workload(problem, compiles=plan.mesh.compile, mesh=plan.mesh, is_searched=is_searched)
    return Answer(
        workload,
        result,
        notes=notes(graph, plan),
        request=request,
        splits=splits(graph, plan),
        fails_in_float64=fails_in_float64(graph),
    )


def model_name(model: str | Path) -> str:
    """What reports call a MODEL: its file's name; a configuration also by its folder, since all have one name."""
    from autoplan.tracing.hugging_face import PREFIX, is_hugging_face

    path = Path(str(model).removeprefix(PREFIX))
    return PREFIX + "/".join(path.parts[-2:]) if is_hugging_face(model) else path.name


def _request(problem: Problem) -> Request:
    settings = tuple(f"{name}={value!r}" for name, value in problem.overrides)
    n_hosts = 1 if isinstance(problem.hardware, Cluster) else problem.hardware.n_hosts  # as --hosts was given
    return Request(problem.model, settings, problem.hw, n_hosts, problem.options)


def _workload(problem: Problem, *, compiles: bool, mesh: Mesh | None = None, is_searched: bool = True) -> Workload:
    from autoplan.analysis.model_flops import flops_per_sample, ops_without_rule
    from autoplan.planning.untried import undivided, untried
    from autoplan.rules import load_rules

    graph, hardware = problem.graph, problem.hardware
    peaks = _peaks_flops_per_s(problem)
    fix = dict(problem.options.fix)
    limits: tuple[str, ...] = MODULE_LEVEL_LIMITS
    if not graph.is_module_level:
        limits = untried(
            graph,
            problem.measured,
            rules=load_rules(problem.options.rules),
            compiles=compiles,
            looks_for_layouts="tp" not in fix,
            mesh=mesh if is_searched else None,
            fixes_micro_batch="micro_batch" in fix,
        )
    return Workload(
        model=model_name(problem.model),
        hardware=hardware.name,
        device=device_names(hardware),
        n_hosts=hardware.n_hosts,
        n_devices=hardware.n_devices,
        n_parameters=graph.n_parameters(),
        flops_per_sample=flops_per_sample(graph, rule_files=problem.options.rules),
        tokens_per_sample=tokens_per_sample(graph),
        peak_flops_per_s=None if isinstance(hardware, Cluster) else peaks[0],
        price_usd_per_device_hour=mean_price_usd_per_device_hour(hardware),
        segment_names=tuple(segment.name for segment in graph.segments),
        segment_modules=tuple(_modules(graph, segment) for segment in graph.segments),
        provenance=_provenance(problem),
        values=_values(problem),
        ops_without_rule=ops_without_rule(graph, rule_files=problem.options.rules),
        objective=problem.options.objective,
        limits=(
            *unusual_of(hardware),
            *_unused_network(hardware),
            *_unshared_batch(problem),
            *(undivided(graph, fix=fix) if is_searched and hardware.n_devices > 1 else ()),
            *limits,
        ),
        groups=tuple(
            WorkloadGroup(kind.name, kind.device.name, kind.n_hosts, kind.n_devices_per_host, peak)
            for kind, peak in zip(hardware.groups, peaks, strict=True)
        )
        if isinstance(hardware, Cluster)
        else (),
    )


def _modules(graph: OpGraph, segment: Segment) -> str:
    """`norm, head, loss_fn`: the first few modules that a segment between blocks calls."""
    ops = () if segment.is_block else graph.ops[segment.start : segment.stop]
    paths = list(dict.fromkeys(op.module_path for op in ops if op.module_path))
    return ", ".join([*paths[:N_MODULES], *["..."] * (len(paths) > N_MODULES)])


def _unused_network(hardware: HardwareProfile | Cluster) -> tuple[str, ...]:
    if isinstance(hardware, Cluster) or hardware.n_hosts > 1 or not hardware.other_network:
        return ()
    return (f"Nothing goes over {hardware.other_network}, which is between hosts: there is one; see --hosts.",)


def _unshared_batch(problem: Problem) -> tuple[str, ...]:
    """Where the batch leaves plans out, since not all devices can have as many samples: that, and the nearest other."""
    hardware, batch = problem.hardware, global_batch_size(problem)
    fixed = {name: value for name, value in problem.options.fix if name in ("dp", "tp", "pp")}
    is_chosen = "dp" in fixed or any(value != "1" for value in fixed.values())
    if isinstance(hardware, Cluster) or is_chosen or batch % hardware.n_devices == 0:
        return ()
    n_devices, per_host = hardware.n_devices, hardware.n_devices_per_host
    most = max(data_parallel_degrees(batch, n_devices=n_devices, n_devices_per_host=per_host))
    near = nearest_shared_batch(batch, n_devices=n_devices)
    return (
        f"A global batch of {batch} can be shared by {count(most, 'data-parallel rank')} at most, not by all"
        f" {n_devices} devices, as DDP and FSDP do" + (f"; --global-batch {near} can be." if near else "."),
    )


def _peaks_flops_per_s(problem: Problem) -> list[float | None]:
    """Of each kind of device, in the precision asked for."""
    precision = problem.options.precision
    return [dict(kind.device.peak_flops_per_s).get(precision) for kind in kinds_of(problem.hardware)]


def _values(problem: Problem) -> tuple[tuple[str, str], ...]:
    """(figure, value with its unit) of all hardware, under the names of `_provenance`."""
    hardware = problem.hardware
    groups = hardware.groups if isinstance(hardware, Cluster) else ()
    return (*((f"{group.name}: {name}", text) for group in groups for name, text in group.values), *hardware.values)


def _provenance(problem: Problem) -> tuple[tuple[str, str], ...]:
    """(figure, where it comes from) of all hardware, and of the times of segments."""
    hardware = problem.hardware
    of_groups = [
        (f"{group.name}: {name}", source)
        for group in (hardware.groups if isinstance(hardware, Cluster) else ())
        for name, source in group.sources
    ]
    measured = () if problem.measured is None else (("times of segments", problem.measured.source),)
    return (*of_groups, *hardware.sources, *measured)
