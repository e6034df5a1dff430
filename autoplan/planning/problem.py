"""A question: this model on that hardware under these options. It is made from what a user names, and checked.

load_hardware -> checked -> trace_model -> Problem        make_problem
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.checks.options import check_batch, check_degrees, check_is_named, check_options
from autoplan.errors import InputError, UsageError
from autoplan.files import check_file
from autoplan.hardware.cluster import Cluster, Hardware, load_hardware
from autoplan.options import DEFAULT_MICRO_BATCH_SIZE, PLAIN_SCHEDULE, Options

if TYPE_CHECKING:
    from autoplan.graph import OpGraph
    from autoplan.measured_profile.segment_times import MeasuredProfile

Overrides = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """One question: this model on that hardware under these options.

    Attributes:
        model_file: the file the graph was traced from; an emitted folder holds a copy of it.
        hardware: equal hosts, or a mixed cluster.
        hw: the name or file that `hardware` was read from, so that it can be read again with more hosts.
        model: what the user named: the model file, or `hf:CONFIG.JSON`, for which `model_file` was written.
        overrides: (name, value) arguments of its build_model, or fields of its configuration.
        measured: what `options.profile` holds of this model, device and precision.
    """

    graph: OpGraph
    hardware: Hardware
    options: Options
    model_file: Path
    hw: str
    model: str
    overrides: tuple[tuple[str, Any], ...] = ()
    measured: MeasuredProfile | None = None


def make_problem(
    model: str | Path,
    *,
    hw: str,
    hosts: int = 1,
    overrides: Overrides | None = None,
    options: Options,
    while_tracing: AbstractContextManager[object] | None = None,
) -> Problem:
    """The hardware first and the options, whose checks are quick; then the trace, which takes seconds.

    `while_tracing` is entered for the trace alone.
    """
    from autoplan.measure_model.lookup import measurements_of
    from autoplan.rules import load_rules

    hardware = load_hardware(hw, n_hosts=hosts)
    options = checked(options)
    check_hardware(hardware, options)
    check_precision(hardware, options)
    load_rules(options.rules)
    if options.profile is not None:
        check_file(Path(options.profile), expected="what autoplan profile MODEL --hw NAME --out FILE measured")
    path, arguments = model_file(model, overrides or {})
    with while_tracing or nullcontext():
        graph = trace_model(path, overrides=arguments, module_level=options.module_level)
    if not graph.n_parameters():
        raise InputError.of(
            str(model),
            found="no parameter that is trained",
            expected="a model with some: a step computes their gradients",
            fix="give it parameters, or leave requires_grad on for those to be trained",
        )
    if options.strict:
        _refuse_ops_without_rule(graph, options.rules)
    measured = None if isinstance(hardware, Cluster) else measurements_of(options, graph, hardware, model=path.name)
    return Problem(graph, hardware, options, path, hw, str(model), tuple((overrides or {}).items()), measured)


def trace_model(model: str | Path, *, overrides: Overrides | None = None, module_level: bool = False) -> OpGraph:
    """The graph of a model; it runs the model file's code, on meta tensors, unless the trace is cached.

    With `module_level` the model itself runs, on the CPU, and the graph is one of whole modules.
    """
    from autoplan.analysis.padded_head import with_padded_head
    from autoplan.tracing.graph_cache import cached_graph

    path, overrides = model_file(model, overrides or {})

    def trace_now() -> OpGraph:
        from autoplan.tracing import module_level as modules
        from autoplan.tracing import trace
        from autoplan.tracing.model_source import model_source
        from autoplan.tracing.optimizer_trial import with_optimizer

        source = model_source(path, dict(overrides))
        graph = modules.trace_modules(source) if module_level else trace.trace_model(source)
        return graph if source.build_optimizer is None else with_optimizer(graph, source.build_optimizer)

    return with_padded_head(cached_graph(path, overrides, trace_now, way="module level" if module_level else ""))


def model_file(model: str | Path, overrides: Overrides) -> tuple[Path, Overrides]:
    """The model file for MODEL, and the arguments of its build_model: `hf:PATH` is written as one, values and all.

    Raises: InputError for what is none, and UsageError for what is no path.
    """
    from autoplan.tracing.hugging_face import is_hugging_face, write_model_file
    from autoplan.tracing.local_modules import check_model_file

    check_is_named(model)
    if is_hugging_face(model):
        return write_model_file(model, overrides), {}
    check_model_file(Path(model))
    return Path(model), overrides


def global_batch_size(problem: Problem) -> int:
    """Samples of one step; by default one micro-batch of `DEFAULT_MICRO_BATCH_SIZE` per device."""
    return problem.options.global_batch or default_global_batch(problem.hardware.n_devices)


def default_global_batch(n_devices: int) -> int:
    """Samples of one step when the user names none."""
    return DEFAULT_MICRO_BATCH_SIZE * n_devices


def checked(options: Options) -> Options:
    """The options, unchanged; raises UsageError for a value that is not possible."""
    from autoplan.search.meshes import SCHEDULES

    return check_options(options, schedules=(*SCHEDULES, PLAIN_SCHEDULE))


def check_hardware(hardware: Hardware, options: Options) -> None:
    """Refuse options that this hardware cannot have before time is spent on a trace."""
    from autoplan.search.meshes import device_counts_of
    from autoplan.space.mixed_space import check_mixed_options

    if isinstance(hardware, Cluster):
        check_mixed_options(options, hardware)  # whose groups may share a batch unevenly
        return
    n_devices, per_host = hardware.n_devices, hardware.n_devices_per_host
    counts = device_counts_of(n_devices, n_devices_per_host=per_host)
    if tp := dict(options.fix).get("tp"):
        from autoplan.space.layouts import check_tensor_degree

        check_tensor_degree(int(tp), hardware)
    check_degrees(options, counts=counts, n_devices_per_host=per_host)
    check_batch(options, default_batch=default_global_batch(n_devices))


def check_precision(hardware: Hardware, options: Options) -> None:
    """Likewise of a precision that one of its devices lacks."""
    from autoplan.cost.op_time import peak_flops_per_s

    for group in hardware.groups if isinstance(hardware, Cluster) else (hardware,):
        peak_flops_per_s(group.device, options.precision, error=UsageError)


def _refuse_ops_without_rule(graph: OpGraph, rule_files: Sequence[str]) -> None:
    from autoplan.analysis.model_flops import ops_without_rule

    names = ops_without_rule(graph, rule_files=rule_files)
    if names:
        raise InputError(
            f"--strict: found ops without a cost rule: {', '.join(names)}\n"
            "  expected: a rule for every op\n"
            "  fix: let `autoplan rule MODEL` find rules and give them with --rules FILE, or leave --strict out"
        )
