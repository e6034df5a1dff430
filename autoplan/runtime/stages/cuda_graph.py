"""A CUDA graph of a step's forward and backward passes: the host launches all of their kernels and collectives at once.

    step 0     as it comes
    step 1     as it comes, and what a replay would miss is noticed: see `_missed_by_replays`
    step 2     captured, which computes nothing, then replayed
    step 3 ..  the batch is copied to where the captured one was, and the graph is replayed

A batch that has not the shapes of the one before, on any rank, puts the capture off, since compiled code may be made
for it. Later, a batch of other shapes runs as it comes, on all ranks. So do all steps where something would be missed,
and those after something that the graph took as it was has changed; the program says so once.

Norm of the gradients, clipping and optimizer stay outside: the host launches them while the device replays. Python
inside of the passes runs while they are captured, and not again.

All passes run on one stream of their own, because autograd remembers on which one it first saw a parameter. Gradients
stay where the capture put them, and so does all that passes need. A step needs that memory in any case; passes beside
the graph, as in evaluation, need theirs besides.
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
from torch.distributed import ProcessGroup

from ..alone import is_alone, speaks_for_all
from ..endings import endings
from ..input_pipeline.batches import flatten_tensors, map_tensors, with_paths
from ..seeds import host_state
from .held_values import Watched, changed_between, held_by
from .recompute import recomputed_and_drawing

N_STEPS_BEFORE = 2  # that are not captured, where all batches have the same shapes
N_SAID = 3  # reasons in a line
AS_CAPTURED, OTHER_SHAPES, CHANGED = range(3)  # what a rank finds before a replay
WAITS = "called a synchronizing CUDA operation"  # what torch's debug mode says


class StepGraph:
    """The passes of every step, captured when they can be.

    Args:
        root: what the passes run.
        passes: from a batch on the device to the loss; leaves gradients in `parameters`.
        parameters: all that are trained on this rank, with their names.
        group: all ranks, over host memory; None for one. Before a replay they ask by the default group.

    Attributes:
        stream: on which all passes run.
    """

    def __init__(
        self,
        root: nn.Module,
        passes: Callable[[Any], torch.Tensor],
        *,
        parameters: Sequence[tuple[str, nn.Parameter]],
        device: torch.device,
        group: ProcessGroup | None,
    ) -> None:
        self._root, self._passes, self._parameters, self._device = root, passes, parameters, device
        self._group, self._has_said_shapes = group, False
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._n_as_they_come, self._may_capture = 0, True
        self._noticed: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Any = None
        self._loss = torch.zeros((), device=device)
        self._gradients: list[torch.Tensor | None] = []
        self._watched: Watched | None = None
        self._seen: list[str] | None = None  # changes that were found ahead

    def run(self, batch: Any) -> torch.Tensor:
        """The loss of a step, whose gradients are then in the parameters, and no others; all ranks must call it in the
        same steps.
        """
        if self._graph is not None and self._is_replayed(batch):
            return self._replay(batch)
        for _, parameter in self._parameters:
            parameter.grad = None
        if self._may_capture and self._n_as_they_come >= N_STEPS_BEFORE - 1 and self._graph is None:
            if self._largest(not _is_like(batch, self._noticed)):
                return self._run_noticing(batch)
            self._capture(batch)
            self._largest(0)  # else ranks would wait in a replay for one that failed to capture
            return self._replay(batch)
        self._n_as_they_come += 1
        with self._on_own_stream():
            return self._passes(batch)

    def _run_noticing(self, batch: Any) -> torch.Tensor:
        """The loss of a step as it comes, after which it is known whether one like it may be captured."""
        self._noticed = _described(batch)
        with _missed_by_replays(self._root) as missed, self._on_own_stream():
            loss = self._passes(batch)
        self._may_capture = not self._largest(len(missed))
        if not self._may_capture:
            self._say("not captured", missed)
        return loss

    def look_ahead(self) -> None:
        """Look for changes now, while the device is busy, and not in the next step, before which it waits for that."""
        if self._watched is not None:
            self._seen = self._watched.changes()

    def forget_seen(self) -> None:
        """Something may have changed since changes were looked for ahead."""
        self._seen = None

    def release(self) -> None:
        """Forget the graph: the communicators that it holds cannot end before. Its memory is given back."""
        self._graph = self._batch = self._watched = None
        self._gradients, self._may_capture = [], False

    def _is_replayed(self, batch: Any) -> bool:
        """Whether this step is; asked of all ranks: NCCL wants a collective captured on each of them, or on none."""
        assert self._watched is not None
        changes = self._watched.changes() if self._seen is None else self._seen
        self._seen = None
        found = CHANGED if changes else AS_CAPTURED if _is_like(batch, self._noticed) else OTHER_SHAPES
        found = self._largest(found, is_idle=True)
        if found == CHANGED:
            self._say("given up", changes)
            self.release()
        elif found == OTHER_SHAPES and not self._has_said_shapes:
            self._has_said_shapes = True
            if speaks_for_all(dist.get_rank()):
                print(
                    "cuda_graph: batches of other shapes than that of the graph go without it, which takes longer than"
                    " planned, and need memory for their activations besides",
                    file=sys.stderr,
                )
        return found == AS_CAPTURED

    def _largest(self, number: int, *, is_idle: bool = False) -> int:
        """The largest that any rank has; waits for the other hosts, not for the device.

        An idle device is asked itself: NCCL takes 0.3 ms less than gloo (2 H200, 2026-11-26).
        """
        if self._group is None:
            return number
        largest = torch.tensor(number, device=self._device if is_idle else "cpu")
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=None if is_idle else self._group)
        return int(largest)

    def _say(self, what: str, why: list[str]) -> None:
        """What becomes of the graph; the first rank that knows why says it."""
        of_ranks = [why]
        if self._group is not None:
            of_ranks = [[] for _ in range(self._group.size())]
            dist.all_gather_object(of_ranks, why, group=self._group)
        first = next(rank for rank, found in enumerate(of_ranks) if found)
        if first == dist.get_rank() or is_alone():
            said = list(dict.fromkeys(why))
            more = f"; and {len(said) - N_SAID} more" if len(said) > N_SAID else ""
            print(
                f"cuda_graph: {what}, so steps take longer than planned: {'; '.join(said[:N_SAID])}{more}",
                file=sys.stderr,
            )

    def _capture(self, batch: Any) -> None:
        self._batch = map_tensors(torch.clone, batch)
        graph = torch.cuda.CUDAGraph()
        try:
            # The threads of NCCL and of a data loader may go on meanwhile.
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"), hidden_capture():
                self._loss = self._passes(self._batch)
        except Exception as error:
            error.add_note(
                "cuda_graph: the passes of this step could not be captured\n  fix: --no-cuda-graph, which is slower"
                " than planned; or plan with --fix cuda_graph=off"
            )
            raise
        self._graph, self._gradients = graph, [parameter.grad for _, parameter in self._parameters]
        self._watched = Watched(self._root, self._parameters)
        endings.holders.add(self)

    def _replay(self, batch: Any) -> torch.Tensor:
        assert self._graph is not None
        for own, given in zip(flatten_tensors(self._batch), flatten_tensors(batch), strict=True):
            own.copy_(given)
        with self._on_own_stream():
            self._graph.replay()
        for (_, parameter), gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss.clone()

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        outer = torch.cuda.current_stream(self._device)
        self.stream.wait_stream(outer)
        with torch.cuda.stream(self.stream):
            yield
        outer.wait_stream(self.stream)


def _is_like(batch: Any, described: Any) -> bool:
    """Whether a batch differs from the one that was described in the contents of its tensors only."""
    try:
        return bool(_described(batch) == described)
    except (RuntimeError, TypeError, ValueError):  # a part of it, such as an array, does not say whether it is equal
        return False


def _described(batch: Any) -> Any:
    """All but the contents of its tensors. Its order too: these are copied one tensor after the other."""
    shapes = [(path, tensor.shape, tensor.dtype) for path, tensor in with_paths(batch)]
    return shapes, map_tensors(lambda _: None, batch)


def hidden_capture() -> AbstractContextManager[Any]:
    """Tell models no that ask whether they are captured, so as not to wait: they did not in the steps before.

    Else those of Hugging Face make masks where they made none, and attention is two to three times slower with them.
    """
    return patch.object(torch.cuda, "is_current_stream_capturing", lambda: False)


@contextmanager
def _missed_by_replays(root: nn.Module) -> Iterator[list[str]]:
    """What the passes inside do that a replay would not do again, in words; known at the end.

    Waiting for the device, as far as torch notices it; drawing random numbers on the host, or on the device in a block
    that is recomputed, for which torch sets the generator back; putting another tensor or another number where a module
    had one, in its lists and dicts too.
    """
    missed: list[str] = []
    held, drawn = held_by(root), host_state()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as found:
        warnings.filterwarnings("always", message=WAITS)
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
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
    missed += [f"{name}, recomputed, draws random numbers" for name in recomputed_and_drawing(root)]
    missed += changed_between(held, held_by(root))
    if drawn != host_state():
        missed.append("the host draws random numbers in forward")
