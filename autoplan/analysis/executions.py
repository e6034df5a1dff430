"""How each kind of segment runs in a program: what of it is compiled, and what reads images in the program's format."""

from __future__ import annotations

from autoplan.graph import IMAGE_DIMS, LOSS_PATH, Op, OpGraph, is_convolution
from autoplan.parallel_plan import Execution


def compiled_kinds(graph: OpGraph) -> frozenset[int]:
    """The kinds of segments that a compiled program compiles: blocks, all of a model without any, and the loss.

    Of the last segment only the loss is: what norm and head would gain, benchmarks/compiled_head.py could not tell.
    """
    first, has_blocks = graph.first_of_kind(), any(segment.is_block for segment in graph.segments)
    with_loss = {
        kind for kind, found in first.items() if any(op.module_path == LOSS_PATH for op in graph.ops_of(found))
    }
    return frozenset(kind for kind, segment in first.items() if segment.is_block or not has_blocks) | with_loss


def image_kinds(graph: OpGraph) -> frozenset[int]:
    """The kinds of segments that read images, whose memory format matters: [sample, channel, height, width].

    In a model without a convolution such tensors are no images, but masks or heads of attention.
    """
    if not (graph.is_module_level or any(map(_convolves_images, graph.ops))):
        return frozenset()
    specs = graph.specs()
    return frozenset(
        kind
        for kind, segment in graph.first_of_kind().items()
        if any(len(specs[name].shape) == IMAGE_DIMS and specs[name].is_float for name in segment.inputs)
    )


def _convolves_images(op: Op) -> bool:
    return is_convolution(op) and len(op.outputs[0].shape) == IMAGE_DIMS


def execution_of(graph: OpGraph, kind: int, execution: Execution) -> Execution:
    """How a kind of segment runs in a program: as the program does, where that makes a difference to it."""
    return Execution(
        compile=execution.compile and kind in compiled_kinds(graph),
        memory_format=execution.memory_format if kind in image_kinds(graph) else Execution().memory_format,
    )
