"""How often Python looks for garbage.

What a command makes (modules, graphs, meshes, models of the solver) lives to its end. By default Python looks through
all of it again and again, whenever there are 700 new objects: a fifth of the time of a cold `plan`, and of a what-if.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS_PER_COLLECTION = 100_000


@contextmanager
def few_collections() -> Iterator[None]:
    """Python looks for garbage more rarely meanwhile; where it never does, or more rarely yet, that stays so."""
    before = gc.get_threshold()
    if 0 < before[0] < NEW_OBJECTS_PER_COLLECTION:
        gc.set_threshold(NEW_OBJECTS_PER_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
