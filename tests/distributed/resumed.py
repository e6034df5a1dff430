"""Training in parts, each under a plan of its own, joined by checkpoints; and the same training undisturbed."""

import importlib
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from distributed.launch import run_ranks
from distributed.programs import Row

OPTIONS = {"seed": 0, "learning_rate": 1e-2, "max_grad_norm": 1.0}


def train_part(root: str, rows: list[Row], folder: str, last_step: int) -> dict[str, Any]:
    """On one rank: go on from the newest checkpoint up to `last_step` steps and save.

    By program, the losses, and after them what stands for the buffers of all ranks.
    """
    runtime, found = _runtime(root), {}
    for name, overrides, config_fields, is_rewritten in rows:
        config = runtime.Config(**config_fields)
        model_file = importlib.import_module(f"model_{name}")
        parallel = importlib.import_module(f"parallel_{name}") if is_rewritten else None
        mesh = runtime.build_rank_mesh(config, "cpu")
        model = runtime.ParallelModel(config, model_file, parallel, mesh=mesh, overrides=overrides, **OPTIONS)
        checkpoints = runtime.Checkpoints(model, Path(folder, name.partition("__")[0]))
        newest = checkpoints.newest()
        if newest is not None:
            checkpoints.load(newest)
        losses = []
        for step in range(model.n_steps, last_step):
            batch = runtime.global_batch(model_file.make_batch, batch_size=config.global_batch_size, seed=0, step=step)
            losses.append(model.step(runtime.local_batch(batch, config=config, dp_rank=mesh.dp_rank)).item())
        checkpoints.save()
        checkpoints.close()
        losses.append(_mean_over_ranks(_buffer_sum(buffer for _, buffer in model.full_buffers())) * config.pp)
        found[name.partition("__")[0]] = losses
    return found


def train_undisturbed(root: str, rows: list[Row], n_steps: int, n_steps_each: int) -> dict[str, Any]:
    """The same of plain training in one process."""
    runtime, found = _runtime(root), {}
    for name, overrides, config_fields, _ in rows:
        import torch

        config = runtime.Config(**config_fields)
        if config.precision == "fp64":
            importlib.import_module("runtime.tensor_parallel.experts").use_float64_grouped_products()
        model_file, cpu = importlib.import_module(f"model_{name}"), torch.device("cpu")
        plain = runtime.PlainTraining(config, model_file, build_device=cpu, device=cpu, overrides=overrides, **OPTIONS)
        losses = []
        for step in range(n_steps):
            batch = runtime.global_batch(model_file.make_batch, batch_size=config.global_batch_size, seed=0, step=step)
            losses.append(plain.step(batch))
            if (step + 1) % n_steps_each == 0:
                losses.append(_buffer_sum(plain.model.buffers()))
        found[name.partition("__")[0]] = losses
    return found


def largest_difference(root: Path, parts: list[list[Row]], *, n_steps_each: int) -> dict[str, float]:
    """By program, the largest difference, of a loss or of the buffers, from the undisturbed training."""
    found: dict[str, list[float]] = {}
    first = 0
    for n_ranks, group in groupby(parts, key=lambda rows: _n_ranks(rows[0])):
        launched = list(group)
        ranks = run_ranks(
            train_parts, n_ranks, str(root), launched, first * n_steps_each, n_steps_each, timeout_s=300.0
        )
        first += len(launched)
        for name, losses in ranks[0].items():
            found.setdefault(name, []).extend(losses)
    (expected,) = run_ranks(
        train_undisturbed, 1, str(root), parts[0], len(parts) * n_steps_each, n_steps_each, timeout_s=300.0
    )
    assert {name: len(losses) for name, losses in found.items()} == {name: len(x) for name, x in expected.items()}
    return {
        name: max(abs(a - b) for a, b in zip(losses, expected[name], strict=True)) for name, losses in found.items()
    }


def train_parts(root: str, parts: list[list[Row]], n_done: int, n_steps_each: int) -> dict[str, Any]:
    """On one rank: parts that take the same number of ranks, one after the other."""
    found: dict[str, list[float]] = {}
    for number, rows in enumerate(parts, start=1):
        last_step = n_done + number * n_steps_each
        for name, losses in train_part(root, rows, str(Path(root, "checkpoints")), last_step).items():
            found.setdefault(name, []).extend(losses)
    return found


def _buffer_sum(buffers: Any) -> float:
    """One number that stands for running statistics."""
    return sum(float(buffer.double().square().sum()) for buffer in buffers)


def _mean_over_ranks(value: float) -> float:
    import torch
    import torch.distributed as dist

    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _n_ranks(row: Row) -> int:
    config = row[2]
    return int(config["dp"] * config["tp"] * config["pp"])


def _runtime(root: str) -> Any:
    sys.path.insert(0, root)
    sys.modules["autoplan.tracing.trace"] = None  # type: ignore[assignment]
    return importlib.import_module("runtime")
