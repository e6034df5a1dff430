"""What a plan has of what `--fix` names."""

from __future__ import annotations

from collections.abc import Collection

from autoplan.options import PLAIN_SCHEDULE
from autoplan.parallel_plan import Mesh, Plan

# What each name of `--fix` means in a mesh; recompute and loss are of plans. The rest changes what is trained.
MESH_FIELDS = {
    "dp": "dp", "tp": "tp", "pp": "pp", "zero": "zero_stage", "shard": "zero_shard_degree",
    "micro_batch": "micro_batch_size", "schedule": "schedule", "stages_per_rank": "n_chunks", "compile": "compile",
    "memory_format": "memory_format", "generated": "generated", "keep_attention": "keeps_attention",
    "cuda_graph": "cuda_graph",
}  # fmt: skip


def is_as_fixed(plan: Plan, fix: Collection[tuple[str, str]]) -> bool:
    """Whether a plan has what `--fix` asks for, of what decides which plans there are; plain recipes are free of it."""
    is_any_schedule = plan.mesh.pp == 1 or ("schedule", PLAIN_SCHEDULE) in fix
    asked = ((name, value) for name, value in fix if not (name == "schedule" and is_any_schedule))
    return all(value_of(name, plan) in (None, value) for name, value in asked)


def value_of(name: str, plan: Plan) -> str | None:
    """What a plan has of what `--fix` names, as `--fix` takes it; None of names that every plan of a search obeys."""
    if name == "recompute":
        return plan.recompute
    return plan.loss if name == "loss" else value_of_mesh(name, plan.mesh)


def value_of_mesh(name: str, mesh: Mesh) -> str | None:
    """Likewise of a mesh; of programs that can be nothing but generated, `--fix generated` says nothing."""
    field = MESH_FIELDS.get(name)
    if field is None or (name == "generated" and mesh.tp * mesh.pp > 1):
        return None
    value = getattr(mesh, field)
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
