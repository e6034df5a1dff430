"""Which rank the others wait for, when a collective never ends.

A time-out of the backend names the rank that waited, not the one that did not come. So a thread of each rank looks at
where its main thread is. While no step ends it tells the others through the launcher's store, and a rank that has
waited for too long says what all of them do and ends the job:

    waits    inside torch.distributed, a backward pass, or the wait for the device
    is busy  anywhere else: in the model, the loss, the data, a file; it is the one the others wait for. So is a rank
             that waits for others which read or write a checkpoint or weights: that has a time-out of its own
    silent   tells nothing: its process is stopped, or holds the interpreter

A rank that ends with an error says so by itself, see `failure_watch`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from .alone import is_alone
from .endings import endings
from .job_store import JobStore
from .parallel import ParallelModel
from .refusal import OTHERS_FIRST_S

LOOKS_PER_LIMIT = 10
MAX_INTERVAL_S = 5.0
_RUNTIME = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_OF_FILES = _RUNTIME / "checkpoints"
_WAITING_IN = (_TORCH / "distributed", _TORCH / "autograd", _TORCH / "cuda")


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What a rank does: "waits" or "is busy", in which line, for how long, after how many steps."""

    does: str
    place: str
    for_s: float
    n_steps: int
    host: str


def watch_for_hangs(model: ParallelModel, *, limit_s: float) -> None:
    """End the job, with a message that names the rank, once this rank has waited `limit_s` within one step.

    Only under a launcher, in whose store the ranks have met; in one process nobody waits.
    Raises: torch's DistError when that store is gone: the rank that held it has ended.
    """
    is_launched = "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ
    if model.config.n_ranks > 1 and is_launched and not is_alone():
        board = JobStore("hang_watch", timeout_s=limit_s)
        stopped = threading.Event()
        main = threading.get_ident()

        def watch() -> None:
            with suppress(dist.DistError):  # the store is gone, with the job
                _watch(model, main, board, limit_s, stopped)

        thread = threading.Thread(target=watch, name="hang watch", daemon=True)
        thread.start()

        def stop() -> None:
            stopped.set()
            thread.join()

        endings.stops.append(stop)


def _watch(model: ParallelModel, main: int, board: JobStore, limit_s: float, stopped: threading.Event) -> None:
    interval_s = min(MAX_INTERVAL_S, limit_s / LOOKS_PER_LIMIT)
    seen, since_s = (-1, ""), time.monotonic()
    while not stopped.wait(interval_s):
        found = whereabouts(main)
        if found is None:
            return
        does, place = found
        if (model.n_steps, does) != seen:
            seen, since_s = (model.n_steps, does), time.monotonic()
            continue
        own = Whereabouts(does, place, time.monotonic() - since_s, model.n_steps, socket.gethostname())
        if own.for_s >= limit_s / 2:
            _tell(board, model.mesh.rank, own)
        if own.does == "waits" and own.for_s >= limit_s - 3 * interval_s:  # before the backend's own time-out
            _end(board, model.config.n_ranks, limit_s)


def whereabouts(thread: int) -> tuple[str, str] | None:
    """Whether a thread waits for other ranks or is busy, and the last line of its stack that is not torch's.

    None when it has ended. No frame outlives this call: it would keep the tensors of that moment, as all gradients.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    stack = [(at.f_code.co_filename, line, at.f_code.co_name) for at, line in traceback.walk_stack(frame)][::-1]
    last = max((i for i, (file, _, _) in enumerate(stack) if not _is_in(file, (_TORCH,))), default=0)
    called = stack[last + 1 :]
    waits = any(_is_in(file, _WAITING_IN) for file, _, _ in called)
    waits = waits or (not called and _is_in(stack[last][0], (_RUNTIME,)))
    waits = waits and not any(_is_in(file, (_OF_FILES,)) for file, _, _ in stack)
    return "waits" if waits else "is busy", "{}:{} in {}".format(*stack[last])


def _is_in(file: str, folders: tuple[Path, ...]) -> bool:
    return any(folder in Path(file).parents for folder in folders)


def describe(found: dict[int, Whereabouts], *, n_ranks: int, limit_s: float) -> str:
    """Which ranks the others wait for, and what every rank does."""
    late = [rank for rank in range(n_ranks) if rank not in found or found[rank].does != "waits"]
    most = max((place.n_steps for place in found.values()), default=0)
    late = late or [rank for rank, place in found.items() if place.n_steps < most]
    who = f"rank {', '.join(map(str, late))} did not come" if late else "all ranks wait, in different places perhaps"
    lines = [f"  rank {rank}: {_line(found.get(rank))}" for rank in range(n_ranks)]
    return (
        f"a collective did not end within {limit_s:g} s: {who}\n" + "\n".join(lines) + "\n"
        "  fix: look at what that rank does there; a larger --timeout if it only is slow"
    )


def _line(place: Whereabouts | None) -> str:
    if place is None:
        return "silent: its process is stopped or gone"
    return f"{place.does} for {place.for_s:.0f} s at {place.place}, after {place.n_steps} steps, on {place.host}"


def _tell(board: JobStore, rank: int, own: Whereabouts) -> None:
    board.ask(lambda store: store.set(str(rank), json.dumps(asdict(own))))


def _told(store: Store, n_ranks: int) -> dict[int, Whereabouts]:
    keys = {rank: str(rank) for rank in range(n_ranks) if store.check([str(rank)])}
    return {rank: Whereabouts(**json.loads(store.get(key))) for rank, key in keys.items()}


def _end(board: JobStore, n_ranks: int, limit_s: float) -> None:
    """Say what all ranks do, unless another rank says it already, and leave."""
    if board.ask(lambda store: store.add("n_reports", 1)) > 1:
        time.sleep(OTHERS_FIRST_S)
    else:
        found = board.ask(lambda store: _told(store, n_ranks))
        print(describe(found, n_ranks=n_ranks, limit_s=limit_s), file=sys.stderr, flush=True)
    os._exit(1)
