"""What this process does before it ends, whichever way: parts of the program say so as they begin.

with an error, by Ctrl-C    the others are told, then it leaves at once
all ranks together          communicators are let go of, threads end, then the process group does
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet


class HoldsCommunicators(Protocol):
    """What keeps communicators from ending until it lets go of them."""

    def release(self) -> None: ...


@dataclass
class Endings:
    """What is left to do.

    Attributes:
        tells: what tells the other ranks how this one ends.
        stops: what ends a thread that calls torch. Inside of C++ when the interpreter ends, it would abort the process:
            "terminate called without an active exception".
        holders: of communicators.
    """

    tells: list[Callable[[str], None]] = field(default_factory=list)
    stops: list[Callable[[], None]] = field(default_factory=list)
    holders: WeakSet[HoldsCommunicators] = field(default_factory=WeakSet)

    def tell(self, how: str) -> None:
        """Tell the others; nothing is undone, as the process leaves."""
        for tell in self.tells:
            tell(how)

    def release(self) -> None:
        """Let all communicators go; their holders can be asked again."""
        for holder in list(self.holders):
            holder.release()

    def stop(self) -> None:
        """End the threads; nobody is told anything from then on."""
        self.tells.clear()
        while self.stops:
            self.stops.pop()()


endings = Endings()  # of this process
