"""Codegen: OpGraph x Plan -> Program, the text of every file that trains the model without autoplan.

train.py            the program
model.py            the user's file as it is, and beside it the modules that it imports from its folder
parallel_model.py   the model rewritten for one rank; with tensor or pipeline parallelism, or where it is faster
runtime/            copied as it is from `autoplan.runtime`

writer has what all parts are written from: graph, plan, layouts, names. Of parallel_model.py

    blocks, stages, loss              its classes, and `loss_fn`; segment_modules has one class alone, to be measured
    containers                        the weights and plain modules of a class
    forward                           the lines of a forward function, with the conversions between layouts
    lines, value_names, expressions   what stands on a line, what values are called, one op as an expression
    printers, call                    how operators print that no rule of `expressions` covers
    float64_products                  casts that a program in float64 needs and the trace in bfloat16 lacks

plan_tables is the plan as the runtime reads it, libraries what the model is made of, train_script the text of train.py;
text and layout_text are Python source itself: its pieces, and its layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from autoplan.analysis.chunked_loss import chunked_head, is_in_compiled
from autoplan.analysis.float32_buffers import float32_buffers, patterns, running_statistics
from autoplan.analysis.head_group import head_group
from autoplan.analysis.mixed_operands import fails_in_float64
from autoplan.analysis.semantics import ignored_target
from autoplan.codegen.parallel_model import parallel_model_text
from autoplan.codegen.train_script import train_script
from autoplan.graph import IN_PLACE, PADDED_LINEAR, WRITES_BATCH, OpGraph, computes_in_float32, is_convolution
from autoplan.options import POWERSGD_START_STEP
from autoplan.parallel_plan import Execution, Plan, StagePlan
from autoplan.rules import OpRule


@dataclass(frozen=True, slots=True)
class Program:
    """Files of a program: (relative path, text)."""

    files: tuple[tuple[str, str], ...]


def generate(
    graph: OpGraph,
    plan: Plan,
    *,
    rules: Mapping[str, OpRule],
    header: str,
    model_text: str,
    local_files: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any],
    workload: Mapping[str, Any] | None = None,
    device_bytes: tuple[int, ...] = (),
) -> Program:
    """The program of a plan; `header` becomes the docstring of train.py.

    `model_text` is the user's model file, `local_files` what it imports from beside it, by path, `overrides` the
    arguments of its build_model, `workload` the fields of `runtime.PlannedFigures`, `device_bytes` what the program is
    expected to reserve, per pipeline rank; it refuses devices that have less.
    """
    found = {
        "train.py": train_script(
            header=header,
            config={**config_values(graph, plan), **({"device_bytes": device_bytes} if device_bytes else {})},
            overrides=dict(overrides),
            workload=workload,
            has_parallel_model=plan.mesh.needs_generated_model,
            has_convolutions=any(map(is_convolution, graph.ops)),
        ),
        "model.py": model_text,
        **(local_files or {}),
    }
    if plan.mesh.needs_generated_model:
        found["parallel_model.py"] = parallel_model_text(graph, plan, rules=rules)
    return Program((*found.items(), *runtime_files().items()))


def runtime_files() -> dict[str, str]:
    """The runtime as every folder holds it, by relative path."""
    return dict(_python_files(files("autoplan") / "runtime", "runtime"))


def _python_files(folder: Traversable, name: str) -> Iterator[tuple[str, str]]:
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if item.name.endswith(".py"):
            yield f"{name}/{item.name}", item.read_text()
        elif item.is_dir() and item.name != "__pycache__":
            yield from _python_files(item, f"{name}/{item.name}")


def config_values(graph: OpGraph, plan: Plan) -> dict[str, Any]:
    """The fields of `runtime.config.Config` for a plan."""
    mesh = plan.mesh
    recomputed = tuple(dict.fromkeys(name for stage in plan.program_stages for name in _recomputed(graph, stage)))
    # Where forward branches on data, ranks may call different blocks: then all parameters are one group.
    blocks = [] if graph.is_module_level else [s.module_path for s in graph.segments if s.is_block]
    return {
        "dp": mesh.dp,
        "tp": mesh.tp,
        "pp": mesh.pp,
        "zero_stage": mesh.zero_stage,
        "zero_shard_degree": mesh.zero_shard_degree,
        "micro_batch_size": mesh.micro_batch_size,
        "n_micro_batches": mesh.n_micro_batches,
        **_share_values(graph, plan),
        "schedule": mesh.schedule,
        "n_chunks": mesh.n_chunks,
        "precision": plan.precision,
        "compile": mesh.compile,
        "batch_norm": plan.batch_norm,
        "ignored_target": ignored_target(graph) if plan.loss_average == "global_batch" else None,
        "recompute": recomputed,
        **({"keep_attention": True} if mesh.keeps_attention else {}),
        "blocks": tuple(dict.fromkeys(blocks)),
        **({"head_group": head_group(graph)} if mesh.wraps_head else {}),
        **({"memory_format": mesh.memory_format} if mesh.memory_format != Execution().memory_format else {}),
        **({"cuda_graph": True} if mesh.cuda_graph else {}),
        **_head_values(graph, plan),
        **_compression_values(plan),
        **({"writes_in_place": True} if IN_PLACE in graph.dissolved and not mesh.needs_generated_model else {}),
        **({"writes_batch": True} if WRITES_BATCH in graph.dissolved else {}),
        **_buffer_values(graph, plan),
        **({"computes_in_float32": True} if computes_in_float32(graph) else {}),
        **({"fails_in_float64": True} if fails_in_float64(graph) else {}),
        **({"is_module_level": True} if graph.is_module_level else {}),
    }


def _buffer_values(graph: OpGraph, plan: Plan) -> dict[str, Any]:
    """Which buffers stay in float32; of the user's own BatchNorm modules the runtime knows it."""
    own = frozenset() if plan.mesh.needs_generated_model else running_statistics(graph)
    kept = float32_buffers(graph) - own if plan.precision in ("bf16", "fp16") else frozenset()
    others = (parameter.name for parameter in graph.parameters if parameter.is_buffer and parameter.name not in own)
    return {"float32_buffers": patterns(kept, others=others)} if kept else {}


def _recomputed(graph: OpGraph, stage: StagePlan) -> tuple[str, ...]:
    """Names of the modules that a stage recomputes."""
    return tuple(dict.fromkeys(graph.segments[index].module_path for index in stage.recomputed))


def _share_values(graph: OpGraph, plan: Plan) -> dict[str, Any]:
    """Those of shares of the batch, each with what it recomputes where that differs."""
    if not plan.mesh.shares:
        return {}
    recomputed = tuple(_recomputed(graph, stage) for stage in plan.stages)
    own = {"share_recompute": recomputed} if len(set(recomputed)) > 1 else {}
    return {"shares": tuple(map(astuple, plan.mesh.shares)), **own}


def _compression_values(plan: Plan) -> dict[str, Any]:
    """Those of compressed gradients."""
    name, power_sgd = plan.grad_compression, {}
    if name == "powersgd":
        power_sgd = {"powersgd_rank": plan.powersgd_rank, "powersgd_start_step": POWERSGD_START_STEP}
    return {} if name == "none" else {"grad_compression": name, **power_sgd}


def _head_values(graph: OpGraph, plan: Plan) -> dict[str, Any]:
    """Those of a chunked loss and of padded classes; where all is one compiled function, torch pads by itself."""
    head = chunked_head(graph)
    if head is None:
        return {}
    product, found = head.ops[0], {}
    if plan.loss == "chunked":
        rows = head.slice_rows(is_compiled=plan.mesh.compile)
        found = {"chunked_head": product.module_path, "loss_slice_rows": rows}
    is_own = not plan.mesh.needs_generated_model
    if product.target == PADDED_LINEAR and is_own and not is_in_compiled(graph, plan.mesh):
        found["padded_head"] = product.module_path
    return found
