"""A CUDA graph of a step's forward and backward passes: the host launches all of their kernels and collectives at once.

    step 0     as it comes
    step 1     as it comes, and what a replay would miss is noticed: see `_missed_by_replays`
    step 2     captured, which computes nothing, then replayed
    step 3 ..  the batch is copied to where the captured one was, and the graph is replayed

Norm of the gradients, clipping and optimizer stay outside: the host launches them while the device replays. A batch of
other shapes runs as it comes. So do all steps where something would be missed, and those after something that the graph
took as it was has changed; the program says so once. Python inside of the passes runs while they are captured, and not
again.

All passes run on one stream of their own, because autograd remembers on which one it first saw a parameter. Gradients
stay where the capture put them, and so does all that passes need; it is memory that a step needs in any case.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from .batches import flatten_tensors, map_tensors
from .held_values import Watched, changed_between, held_by
from .mesh import release_before_stop
from .seeds import host_state

N_STEPS_BEFORE = 2
WAITS = "called a synchronizing CUDA operation"  # what torch's debug mode says


class StepGraph:
    """The passes of every step, captured when they can be.

    Args:
        root: what the passes run.
        passes: from a batch on the device to the loss; leaves gradients in `parameters`, which have none before.
        parameters: all that are trained on this rank.
    """

    def __init__(
        self,
        root: nn.Module,
        passes: Callable[[Any], torch.Tensor],
        *,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
    ) -> None:
        self._root, self._passes, self._parameters, self._device = root, passes, parameters, device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._n_steps, self._may_capture = 0, True
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Any = None
        self._loss = torch.zeros((), device=device)
        self._gradients: list[torch.Tensor | None] = []
        self._watched: Watched | None = None

    def run(self, batch: Any) -> torch.Tensor:
        """The loss of a step, whose gradients are then in the parameters; all ranks must call it alike."""
        if self._graph is None and self._may_capture and self._n_steps == N_STEPS_BEFORE:
            self._capture(batch)
        self._n_steps += 1
        if self._graph is not None and _is_like(batch, self._batch):
            assert self._watched is not None
            changed = self._watched.changes()
            if not changed:
                return self._replayed(batch)
            print(f"cuda_graph: given up, so steps take longer than planned: {'; '.join(changed)}", file=sys.stderr)
            self.release()
        if self._n_steps != N_STEPS_BEFORE:
            with self._on_own_stream():
                return self._passes(batch)
        with _missed_by_replays(self._root) as missed, self._on_own_stream():
            loss = self._passes(batch)
        self._may_capture = self._is_nothing_missed(missed)
        return loss

    def release(self) -> None:
        """Forget the graph: the communicators that it holds cannot end before."""
        self._graph, self._may_capture = None, False

    def _capture(self, batch: Any) -> None:
        self._batch = map_tensors(torch.clone, batch)
        graph = torch.cuda.CUDAGraph()
        try:
            # The threads of NCCL and of a data loader may go on meanwhile.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"), _going_as_before():
                self._loss = self._passes(self._batch)
        except Exception as error:
            error.add_note(
                "cuda_graph: the passes of this step could not be captured\n  fix: --no-cuda-graph, which is slower"
                " than planned; or plan with --fix cuda_graph=off"
            )
            raise
        self._graph, self._gradients = graph, [parameter.grad for parameter in self._parameters]
        self._watched = Watched(self._root, self._parameters)
        release_before_stop(self)

    def _replayed(self, batch: Any) -> torch.Tensor:
        assert self._graph is not None
        for own, given in zip(flatten_tensors(self._batch), flatten_tensors(batch), strict=True):
            own.copy_(given)
        with self._on_own_stream():
            self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss.clone()

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            yield
        outer.wait_stream(self._stream)

    def _is_nothing_missed(self, missed: list[str]) -> bool:
        """Whether that is so on every rank; the first one with something missed says what."""
        of_ranks: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(of_ranks, missed)
        first = next((rank for rank, found in enumerate(of_ranks) if found), None)
        if first == dist.get_rank():
            said = "; ".join(dict.fromkeys(missed))
            print(f"cuda_graph: not captured, so steps take longer than planned: {said}", file=sys.stderr)
        return first is None


def _is_like(batch: Any, other: Any) -> bool:
    """Whether a batch differs from another one in the contents of its tensors only."""
    try:
        return bool(_described(batch) == _described(other))
    except (RuntimeError, TypeError, ValueError):  # a part of it, such as an array, does not say whether it is equal
        return False


def _described(batch: Any) -> Any:
    return map_tensors(lambda tensor: (tensor.shape, tensor.dtype), batch)


def _going_as_before() -> AbstractContextManager[Any]:
    """Models that ask whether they are captured, so as not to wait, go as in the steps before, which did not wait.

    Else those of Hugging Face make masks where they made none, and attention is two to three times slower with them.
    """
    return patch.object(torch.cuda, "is_current_stream_capturing", lambda: False)


@contextmanager
def _missed_by_replays(root: nn.Module) -> Iterator[list[str]]:
    """What the passes inside do that a replay would not do again, in words; known at the end.

    Waiting for the device, as far as torch notices it; drawing random numbers on the host; putting another tensor or
    another number where a module had one, in its lists and dicts too.
    """
    missed: list[str] = []
    held, drawn = held_by(root), host_state()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as found:
        warnings.filterwarnings("always", message=WAITS)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield missed
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for warning in found:
        if WAITS in str(warning.message):
            missed.append(f"the host waits for the device in {warning.filename}:{warning.lineno}")
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    missed += changed_between(held, held_by(root))
    if drawn != host_state():
        missed.append("the host draws random numbers in forward")
