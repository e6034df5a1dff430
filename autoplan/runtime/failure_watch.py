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
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from .refusal import OTHERS_FIRST_S, is_first_of_host

CONNECTION_S = 30.0  # the store is up, since the ranks met in it, unless the rank that holds it has ended already
INTERVAL_S = 5.0
FAILED = "failed"  # under which the store has what a rank says of itself
WITH_AN_ERROR, INTERRUPTED = "ended with an error", "was interrupted"


def connected_store(name: str, *, timeout_s: float) -> Store:
    """The part `name` of the launcher's store, in which the ranks have met, on a connection of its own.

    Raises: torch's DistError when that store is gone: the rank that held it has ended.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=min(timeout_s, CONNECTION_S))
    store = TCPStore(address, port, is_master=False, timeout=timeout)
    return PrefixStore(f"{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


class FailureWatch:
    """Ends this process soon after another rank has told that it fails, or has left with the store.

    All ranks must stop it together, after their last step.
    Raises: torch's DistError when the launcher's store is gone.
    """

    def __init__(self, rank: int, *, timeout_s: float) -> None:
        # Connected here: the constructor of a store cannot be stopped.
        self._rank, self._store = rank, connected_store("failure_watch", timeout_s=timeout_s)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failure watch", daemon=True)
        self._thread.start()

    def tell(self, how: str) -> None:
        """Before this process leaves, `WITH_AN_ERROR` or `INTERRUPTED`."""
        self._stopped.set()
        with suppress(dist.DistError):  # the store may be gone with the process that held it
            self._store.set(FAILED, f"rank {self._rank} {how}")

    def stop(self) -> None:
        """Before this process ends well."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._store.check([FAILED]):
                if self._stopped.wait(INTERVAL_S):
                    return
            why = self._store.get(FAILED).decode()
        except dist.DistError:
            why = "the store of the launcher is gone, with the job"
        if self._stopped.wait(OTHERS_FIRST_S):  # this process ends by itself
            return
        if is_first_of_host():
            print(f"{why}; the ranks of this host end, too", file=sys.stderr, flush=True)
        os._exit(1)
