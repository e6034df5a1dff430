"""Registry: reads the tables that extension files end with.

Adding a file to a package adds its entries; nothing registers itself, and importing has no effect. The same key in
two files is an error that names both.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Hashable
from importlib import import_module
from typing import Any

from autoplan.errors import InputError


def load_table(package: str, table: str) -> dict[Any, Any]:
    """The entries of the table named `table` of every module of `package`, modules in order of name.

    A module without that table adds nothing. Raises InputError when two modules hold the same key.
    """
    entries: dict[Hashable, Any] = {}
    home: dict[Hashable, str] = {}
    folder = import_module(package)
    for info in sorted(pkgutil.iter_modules(folder.__path__), key=lambda info: info.name):
        module = import_module(f"{package}.{info.name}")
        for key, entry in getattr(module, table, {}).items():
            if key in home:
                raise InputError.of(
                    f"{table} key {key!r}",
                    found=f"{home[key]}.py and {info.name}.py of {package}",
                    expected="each key in one file",
                    fix="delete or rename one of the two entries",
                )
            entries[key], home[key] = entry, info.name
    return entries
