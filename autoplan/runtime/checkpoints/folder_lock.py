"""One job at a time in a folder of checkpoints: a file that its first rank holds locked.

The lock is of the process (POSIX): it ends with the process, however that ends, and workers that read data do not
inherit it. It does not keep the same process out, and would end as soon as that closed the file once; so one that has
the file open is refused before it opens it again. A job that was restarted on another host may meet the lock until the
file system has noticed that the old one is gone, so it waits a while. File systems without locks exist; there a job
goes on, and says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import sys
import time
from pathlib import Path

from .planner import CheckpointError

NAME = ".in-use"
WAIT_S = 60.0
_LOOK_S = 0.5
_TAKEN = (errno.EACCES, errno.EAGAIN)


def lock_folder(folder: Path, *, wait_s: float = WAIT_S) -> int | None:
    """Lock a folder for this process; what `unlock_folder` takes, or None where its file system has no locks.

    Raises: CheckpointError when this process holds it, or another job still does after `wait_s`; OSError when the
        folder cannot be written.
    """
    path = folder / NAME
    if _is_open_here(path):
        raise CheckpointError(
            f"{folder}: this process saves there already\n"
            "  fix: close() the Checkpoints that does, or choose another folder"
        )
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError as error:
        if not path.exists():
            raise
        _say_without(path, error)  # of another user's job
        return None
    deadline_s, is_told = time.monotonic() + wait_s, False
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _TAKEN:
                os.close(descriptor)
                _say_without(path, error)
                return None
        else:
            break
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process"
        if time.monotonic() >= deadline_s:
            os.close(descriptor)
            raise CheckpointError(
                f"{folder}: another job saves there: {holder}\n"
                "  fix: choose another --checkpoint-dir, or wait until that job has ended"
            )
        if not is_told:
            print(f"{folder}: waits up to {wait_s:g} s for another job that saves there: {holder}", file=sys.stderr)
            is_told = True
        time.sleep(_LOOK_S)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


def _is_open_here(path: Path) -> bool:
    """Whether a descriptor of this process is that file."""
    if path.exists():
        found = path.stat()
        for descriptor in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # the one that listed them
                if os.path.samestat(os.fstat(int(descriptor)), found):
                    return True
    return False


def _say_without(path: Path, error: OSError) -> None:
    print(f"{path}: cannot be locked ({error.strerror}): start no second job there", file=sys.stderr)


def unlock_folder(descriptor: int | None) -> None:
    """Let other jobs have it; the file stays, as one of them may wait for it."""
    if descriptor is not None:
        os.close(descriptor)
