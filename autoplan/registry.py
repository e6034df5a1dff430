"""Registry: reads the tables that extension files end with.

Adding a file to a package adds its entries, and so does naming a file of one's own; nothing registers itself, and
importing has no effect. The same key in two files is an error that names both.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Hashable, Iterator, Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from autoplan.errors import InputError
from autoplan.files import check_file
from autoplan.user_errors import USERS_ERRORS, import_failure


def load_table(package: str, table: str, files: Sequence[str] = (), *, of: type = object) -> dict[Any, Any]:
    """The entries of the table named `table` of every module of `package`, in order of name, and of these files.

    A module without that table adds nothing; a file must have it. Loading a file runs its code.
    Raises: InputError when two of them hold the same key, an entry is of another type than `of`, or a file cannot be
        loaded.
    """
    entries: dict[Hashable, Any] = {}
    home: dict[Hashable, str] = {}
    for where, found in (*_package_tables(package, table), *((file, _file_table(file, table)) for file in files)):
        for key, entry in found.items():
            if key in home:
                raise InputError.of(
                    f"{table} key {key!r}",
                    found=f"in {home[key]} and in {where}",
                    expected="each key in one file",
                    fix="delete or rename one of the two entries",
                )
            if not isinstance(entry, of):
                raise InputError.of(
                    f"{where}: {table}[{key!r}]",
                    found=type(entry).__name__,
                    expected=of.__name__,
                    fix=f"see the files of {package.rpartition('.')[2]}/ for examples",
                )
            entries[key], home[key] = entry, where
    return entries


def _package_tables(package: str, table: str) -> Iterator[tuple[str, dict[Any, Any]]]:
    folder = import_module(package)
    for info in sorted(pkgutil.iter_modules(folder.__path__), key=lambda info: info.name):
        yield f"{info.name}.py of {package}", getattr(import_module(f"{package}.{info.name}"), table, {})


def _file_table(file: str, table: str) -> dict[Any, Any]:
    found = getattr(_loaded(Path(file)), table, None)
    if not isinstance(found, dict):
        raise InputError.of(
            f"{file}: {table}",
            found="no such table" if found is None else type(found).__name__,
            expected=f"a dict, {table} = {{...}}, at the end of the file",
            fix="see the files of cost_models/ for examples",
        )
    return found


def _loaded(path: Path) -> ModuleType:
    check_file(path, expected="a Python file")
    spec = spec_from_file_location(f"autoplan_extension_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError.of(str(path), found=f"suffix {path.suffix!r}", expected=".py", fix="rename the file")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except USERS_ERRORS as error:
        raise InputError(import_failure(path, error)) from error
    return module
