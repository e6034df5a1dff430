"""A rank that ends with an error tells the others, and they leave: what they wait for will not come.

NCCL would not notice, on another host not before its time-out. It is told through the launcher's store, from the start
of the process group on, and whatever the others do then: wait, build a model, read or write a checkpoint.
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
FAILED = "failed"  # under which the store has the rank that ended with an error


def connected_store(name: str, *, timeout_s: float) -> Store:
    """The part `name` of the launcher's store, in which the ranks have met, on a connection of its own.

    Raises: torch's DistError when that store is gone: the rank that held it has ended.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=min(timeout_s, CONNECTION_S))
    store = TCPStore(address, port, is_master=False, timeout=timeout)
    return PrefixStore(f"{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


class FailureWatch:
    """Ends this process soon after another rank has told that it fails.

    Raises: torch's DistError when the launcher's store is gone.
    """

    def __init__(self, rank: int, *, timeout_s: float) -> None:
        # Connected here: the constructor of a store cannot be stopped, see `stop_at_end`.
        self._rank, self._store = rank, connected_store("failure_watch", timeout_s=timeout_s)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failure watch", daemon=True)
        self._thread.start()

    def tell(self) -> None:
        """Before this process leaves for an error."""
        self._stopped.set()
        with suppress(dist.DistError):  # the store may be gone with the process that held it
            self._store.set(FAILED, str(self._rank))

    def stop(self) -> None:
        """Before this process ends well."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        with suppress(dist.DistError):
            while not self._store.check([FAILED]):
                if self._stopped.wait(INTERVAL_S):
                    return
            rank = self._store.get(FAILED).decode()
            if self._stopped.wait(OTHERS_FIRST_S):  # with an error of its own
                return
            if is_first_of_host():
                print(f"rank {rank} ended with an error; so do the ranks of this host", file=sys.stderr, flush=True)
            os._exit(1)
