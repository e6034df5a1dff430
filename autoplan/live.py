"""What takes a live module: trace(), and parallelize(), which executes the very source that `plan --out` writes.

module --trace--> OpGraph --plan on rank 0--> Plan --generate--> parallel_model.py --exec--> ParallelModel
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from autoplan.checks.options import options_of
from autoplan.errors import PlanMismatchError, UsageError
from autoplan.graph import OpGraph
from autoplan.hardware import HardwareProfile, load_hardware_profile
from autoplan.options import Options
from autoplan.parallel_plan import Plan
from autoplan.planning.problem import Overrides, checked, default_global_batch, trace_model
from autoplan.rules import load_rules

if TYPE_CHECKING:
    from torch import Tensor, nn

    from autoplan.runtime import ParallelModel
    from autoplan.search.result import SearchResult
    from autoplan.tracing.model_source import ModelSource


def trace(
    model: nn.Module | str | Path,
    batch: tuple[Any, Any] | None = None,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    overrides: Overrides | None = None,
    module_level: bool = False,
) -> OpGraph:
    """The graph of a model for every batch size: of a model file, or of a module with an example batch.

    `batch` is (inputs, targets) with the batch as first dim; a model file brings its own, its loss too, and takes
    `overrides`. With `module_level` the model runs on the CPU, and the graph is one of whole modules.

    Raises: TraceError when the model cannot be followed; UsageError for a module without a batch.
    """
    if isinstance(model, str | Path):
        return trace_model(model, overrides=overrides, module_level=module_level)
    if batch is None:
        raise UsageError("trace: batch: found None\n  expected: (inputs, targets)\n  fix: give an example of both")
    from autoplan.analysis.padded_head import with_padded_head
    from autoplan.tracing import trace as tracing
    from autoplan.tracing.model_source import module_source

    source = module_source(model, batch, loss_fn)
    return with_padded_head(_run_modules(source, model) if module_level else tracing.trace_model(source))


_GIVEN = "_given_to_autoplan"  # an attribute of modules that have given their weights away


def parallelize(
    module: nn.Module,
    example_batch: tuple[Any, Any],
    *,
    hw: str,
    hosts: int = 1,
    plan: Plan | None = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    build_optimizer: Callable[[Any], Any] | None = None,
    device_type: str | None = None,
    **options: Any,
) -> ParallelModel:
    """The part of `module` that is this rank's under a plan for all processes of the group; every process must call it.

    `example_batch` is (inputs, targets) with the batch as first dim. Without `plan` the search runs on rank 0, over
    plans that use every process; `options` are the fields of `Options`. The result is called like the module, and
    `.step(batch)` runs one optimizer step on this data-parallel rank's samples. `module` gives its weights away.
    `device_type` is "cuda" or "cpu"; None stands for "cuda" where there is a device.

    Raises: UsageError for an option that is not possible, or a module that was given before; PlanMismatchError when the
        plan is for another number of processes or another model; InputError when it is impossible in itself.
    """
    from autoplan import runtime
    from autoplan.checks.plan import check_plan

    if not hasattr(module, "named_parameters"):
        fix = "give the model itself; autoplan.plan takes the file of one"
        raise UsageError.of("module", found=type(module).__name__, expected="a torch.nn.Module", fix=fix)
    if hasattr(module, _GIVEN):
        found, expected = "a module that parallelize was given before", "one that still has its weights"
        raise UsageError.of("module", found=found, expected=expected, fix="make a new one for each call")
    device_type = device_type or runtime.default_device_type()
    chosen = checked(options_of(options))
    hardware = load_hardware_profile(hw, n_hosts=hosts)
    load_rules(chosen.rules)
    graph = trace(module, example_batch, loss_fn=loss_fn, module_level=chosen.module_level)
    runtime.join_process_group(device_type)
    n_processes = runtime.world_size()
    if plan is None:
        plan = runtime.from_first_rank(lambda: _best_plan(graph, hardware, chosen, n_processes))
    if plan.mesh.n_devices != n_processes:
        raise PlanMismatchError(
            f"the plan is for {plan.mesh.n_devices} processes, {n_processes} are running\n"
            "  fix: start as many processes as the plan has devices, or let parallelize() plan"
        )
    check_plan(plan, graph, hardware, rule_files=chosen.rules)
    config, parallel_model = live_program(graph, plan, rule_files=chosen.rules)
    given = {"loss_fn": loss_fn, "build_optimizer": build_optimizer}
    functions = {name: function for name, function in given.items() if function is not None}
    model_file = SimpleNamespace(build_model=lambda: module, **functions)
    mesh = runtime.build_rank_mesh(config, device_type)
    setattr(module, _GIVEN, True)
    return runtime.ParallelModel(config, model_file, parallel_model, mesh=mesh)


_NUMBERS = count(1)


def live_program(graph: OpGraph, plan: Plan, *, rule_files: Sequence[str] = ()) -> tuple[Any, ModuleType | None]:
    """The runtime's Config of a plan, and its generated module (None when the user's classes are used as they are)."""
    from autoplan import runtime
    from autoplan.codegen import config_values
    from autoplan.codegen.parallel_model import parallel_model_text

    config = runtime.Config(**config_values(graph, plan))
    if not plan.mesh.needs_generated_model:
        return config, None
    text = parallel_model_text(graph, plan, rules=load_rules(rule_files))
    generated = ModuleType(f"parallel_model_{next(_NUMBERS)}")
    sys.modules[generated.__name__] = generated  # where torch.compile looks for what its functions read
    code = compile(text.replace("from runtime.", "from autoplan.runtime."), "<parallel_model.py>", "exec")
    exec(code, vars(generated))
    return config, generated


def _run_modules(source: ModelSource, module: nn.Module) -> OpGraph:
    """The graph of whole modules, from a run of a copy, so that buffers of `module` stay as they are."""
    from autoplan.tracing.module_level import trace_modules

    return trace_modules(replace(source, build_model=lambda: copy.deepcopy(module).cpu()))


def _best_plan(graph: OpGraph, hardware: HardwareProfile, options: Options, n_processes: int) -> Plan:
    from autoplan.measure_model.lookup import measurements_of
    from autoplan.planning.confidence import search_confidently
    from autoplan.search import search
    from autoplan.space.priced import priced_space

    global_batch = options.global_batch or default_global_batch(n_processes)
    measured = measurements_of(options, graph, hardware, model=graph.name)

    offered = priced_space(
        graph, hardware, options, global_batch=global_batch, n_devices=n_processes, measured=measured
    )

    def under(options: Options, planless_share: float) -> SearchResult:
        own = offered.with_confidence(options.memory_confidence)
        return search(
            own.space, price=own.price, options=options, make_plan=own.make_plan, planless_share=planless_share
        )

    result = search_confidently(under, options)
    if result.best is None:
        raise PlanMismatchError(
            f"{hardware.name}: no plan for {n_processes} processes ({result.status})\n  found: {result.why_nothing}"
        )
    return result.best.plan
