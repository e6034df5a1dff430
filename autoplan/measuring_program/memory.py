"""Bytes that one pass of a call keeps for its backward pass, and needs besides."""

from collections.abc import Iterator
from typing import Any

import torch

from .timing import Call, Clock, n_bytes

MAX_COPIES = 4
COPIED_WEIGHT_BYTES = 256 * 2**20  # enough copies to hold this much, so that no weight waits in the cache
MEMORY_SHARE = 0.4  # of what is free, for copies and what they save


def memory_of(call: Call, clock: Clock, seen: list[Any]) -> dict[str, Any]:
    """What one pass keeps and needs, and which collectives it asks for in each direction; these are added to `seen`."""
    call.backward(call.forward())  # what is allocated once, such as workspaces, is there from now on
    left_out = {_storage(t) for t in (*call.module.parameters(), *call.module.buffers(), *call.kept_once)}
    before = {_storage(t) for t in call.inputs}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in left_out:
            saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    for leaf in (*call.module.parameters(), *call.inputs):
        leaf.grad = None
    seen.clear()
    start_bytes = _restart_peak(clock)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = call.forward()
    for tensor in _kept_aside(results):
        pack(tensor)
    forward_peak_bytes = _restart_peak(clock, peak=True)
    forward_seen, n_forward = list(seen), len(seen)
    new_bytes = sum(size for storage, size in saved.items() if storage not in before)
    call.backward(results)
    del results
    backward_peak_bytes = _restart_peak(clock, peak=True)
    backward_seen = seen[n_forward:]
    working_bytes = None
    if clock.is_cuda:
        of_results, of_weights = (call.gradient_bytes(of_weights=way) for way in (False, True))
        peak_bytes = max(forward_peak_bytes, backward_peak_bytes + of_results)
        working_bytes = peak_bytes - start_bytes - new_bytes - of_weights
    saved_bytes = sum(saved.values())
    return {
        "saved_bytes": saved_bytes,
        "working_bytes": working_bytes,
        "collectives": (forward_seen, list(backward_seen)),
    }


def _kept_aside(results: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What compiled code keeps for its backward pass without autograd's hooks knowing (torch 2.12 and later)."""
    waiting, known = [result.grad_fn for result in results], set()
    while waiting:
        node: Any = waiting.pop()
        if node is not None and node not in known:
            known.add(node)
            yield from getattr(node, "_tensors_no_vc_check", None) or ()
            waiting.extend(before for before, _ in node.next_functions)


def _restart_peak(clock: Clock, *, peak: bool = False) -> int:
    """Bytes allocated now, or at most since the last call."""
    if not clock.is_cuda:
        return 0
    clock.wait()
    found = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def n_more_copies(call: Call, memory: dict[str, Any], clock: Clock) -> int:
    """How many further copies are wanted and have room."""
    weight_bytes = sum(n_bytes(p) for p in call.module.parameters())
    wanted = min(MAX_COPIES, -(-COPIED_WEIGHT_BYTES // weight_bytes)) if weight_bytes else 1
    if not clock.is_cuda:
        return min(1, wanted - 1)
    free_bytes = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    input_bytes = sum(map(n_bytes, call.inputs))
    each = 2 * weight_bytes + memory["saved_bytes"] + 3 * input_bytes
    room = (MEMORY_SHARE * free_bytes - (memory["working_bytes"] or 0)) // each if each else wanted
    return int(max(0, min(wanted - 1, room)))
