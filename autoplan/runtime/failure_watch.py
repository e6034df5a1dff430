"""A rank that fails tells the others, and they leave: what they wait for will not come.

It writes to the launcher's store, which a thread of every rank reads from the start of the process group on, whatever
its main thread does: it may wait, build a model, read or write a checkpoint. NCCL by itself would notice at its
time-out. Where the process that held the store has ended, the job has failed, too.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from .refusal import OTHERS_FIRST_S, is_first_of_host

Answer = TypeVar("Answer")
CONNECTION_S = 30.0  # the store is up, since the ranks met in it, unless the rank that holds it has ended already
RECONNECTION_S = 5.0
INTERVAL_S = 5.0
FAILED = "failed"  # under which the store has what a rank says of itself
WITH_AN_ERROR, INTERRUPTED = "ended with an error", "was interrupted"


class JobStore:
    """The part `name` of the store in which the ranks have met, on a connection of its own.

    Raises: torch's DistError when that store is gone: the launcher, or the rank that held it, has ended.
    """

    def __init__(self, name: str, *, timeout_s: float) -> None:
        self._name = f"{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = self._connected(min(timeout_s, CONNECTION_S))

    def ask(self, call: Callable[[Store], Answer]) -> Answer:
        """What `call` returns, given the store; over a new connection if this one is broken."""
        try:
            return call(self._store)
        except dist.DistError:
            self._store = self._connected(RECONNECTION_S)
            return call(self._store)

    def _connected(self, timeout_s: float) -> Store:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        return PrefixStore(self._name, store)


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
