"""The order in which parallelism is applied to a stage; it is the same for every plan.

    stages -> tensor-parallel weights, with ties -> compile -> head -> BatchNorm -> recompute -> ZeRO
    -> optimizer -> pipeline

`parallel` does what comes before and after, this module what lies between. Recompute goes around compile: the other way
round, each block is compiled anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..config import Config
from ..input_pipeline.memory_format import take_images
from ..mesh import RankMesh
from .batch_norm import data_parallel_groups, normalize_in_float32, synchronize_batch_norm
from .chunked_loss import defer_products
from .compiled import compile_blocks
from .grad_compression import PowerSGD
from .in_place import allow_writes
from .padded_head import pad_classes
from .recompute import apply_recompute
from .scalar_parameters import hold_as_vectors
from .zero import apply_zero


def apply_in_order(
    stage: nn.Module, *, blocks: Sequence[str], is_generated: bool, config: Config, mesh: RankMesh
) -> PowerSGD | None:
    """Make a stage with its tensor-parallel weights run as planned, on the device; what its compression remembers."""
    if config.compile:
        compile_blocks(stage, blocks, mesh.device)
    if not is_generated:
        _change_head(stage, config)
    if config.compute_dtype != config.parameter_dtype:
        normalize_in_float32(stage)
    if config.batch_norm == "synchronized" and config.dp > 1:
        synchronize_batch_norm(stage, config.recompute, data_parallel_groups(mesh.zero_mesh))
    apply_recompute(stage, config.recompute_of(mesh.dp_rank), keeps_attention=config.keep_attention)
    hold_as_vectors(stage)
    compressed = apply_zero(stage, blocks=blocks, mesh=mesh.zero_mesh, config=config)
    if config.writes_in_place:
        allow_writes(stage)
    stage.to(mesh.device)
    take_images(stage, config.memory_format, blocks=blocks)
    return compressed


def _change_head(stage: nn.Module, config: Config) -> None:
    """Let the product of the head be computed as planned, where that is not as the user's module does it."""
    if config.chunked_head:
        defer_products(
            stage.get_submodule(config.chunked_head),
            slice_rows=config.loss_slice_rows,
            is_compiled=config.compile,
            pads_classes=bool(config.padded_head),
        )
    elif config.padded_head:
        pad_classes(stage.get_submodule(config.padded_head))
