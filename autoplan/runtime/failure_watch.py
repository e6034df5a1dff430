"""A rank that fails tells the others, and they leave: what they wait for will not come.

It writes to the launcher's store, which a thread of every rank reads from the start of the process group on, whatever
its main thread does: it may wait, build a model, read or write a checkpoint. NCCL by itself would notice at its
time-out. Where the process that held the store has ended, the job has failed, too.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

import torch.distributed as dist

from .job_store import JobStore
from .refusal import OTHERS_FIRST_S, is_first_of_host

INTERVAL_S = 5.0
FAILED = "failed"  # under which the store has what a rank says of itself
WITH_AN_ERROR, INTERRUPTED = "ended with an error", "was interrupted"


class FailureWatch:
    """Ends this process soon after another rank has told that it fails, or has left with the store.

    All ranks must stop it together, after their last step.
    Raises: as JobStore.
    """

    def __init__(self, rank: int, *, timeout_s: float) -> None:
        # Connected here: the constructor of a store cannot be stopped.
        self._rank, self._store = rank, JobStore("failure_watch", timeout_s=timeout_s)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failure watch", daemon=True)
        self._thread.start()

    def tell(self, how: str) -> None:
        """Before this process leaves, `WITH_AN_ERROR` or `INTERRUPTED`."""
        self._stopped.set()
        with suppress(dist.DistError):  # the store may be gone with the process that held it
            self._store.ask(lambda store: store.compare_set(FAILED, "", f"rank {self._rank} {how}"))  # the first counts

    def stop(self) -> None:
        """Before this process ends well."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._store.ask(lambda store: store.check([FAILED])):
                if self._stopped.wait(INTERVAL_S):
                    return
            why = self._store.ask(lambda store: store.get(FAILED)).decode()
        except dist.DistError:
            why = "the store of the job is gone: rank 0 or the launcher has ended"
        if self._stopped.wait(OTHERS_FIRST_S):  # this process ends by itself
            return
        if is_first_of_host():
            print(f"{why}; the ranks of this host end, too", file=sys.stderr, flush=True)
        os._exit(1)
