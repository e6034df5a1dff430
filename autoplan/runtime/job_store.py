"""The store of a job, in which its ranks have met: the launcher's, or that of rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

Answer = TypeVar("Answer")
CONNECTION_S = 30.0  # the store is up, since the ranks met in it, unless the rank that holds it has ended already
RECONNECTION_S = 5.0


def connected_store(name: str, *, timeout: timedelta) -> Store:
    """The part `name` of the store, over a new connection.

    Raises: torch's DistError when the store is gone: the launcher, or the rank that held it, has ended.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore(name, TCPStore(address, port, is_master=False, timeout=timeout))


class JobStore:
    """The part `name` of the store, for this attempt of the job, on a connection of its own.

    Raises: as `connected_store`.
    """

    def __init__(self, name: str, *, timeout_s: float) -> None:
        self._name = f"{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._connect(min(timeout_s, CONNECTION_S))

    def ask(self, call: Callable[[Store], Answer]) -> Answer:
        """What `call` returns, given the store; over a new connection if this one is broken."""
        try:
            return call(self._store)
        except dist.DistError:
            self._connect(RECONNECTION_S)
            return call(self._store)

    def _connect(self, timeout_s: float) -> None:
        self._store = connected_store(self._name, timeout=timedelta(seconds=timeout_s))
