"""The modules beside a model file that it imports, and those that they import: part of the model.

They are found from the text of the files, wherever in it an import stands, so that a traced graph from the cache has
them too. An import counts where a file or package of that name lies in the folder of the model file, which Python looks
into first when it runs that file.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from autoplan.errors import InputError
from autoplan.files import check_file, read_text_file

OF_PROGRAM = ("train.py", "parallel_model.py", "model.py", "runtime")  # modules that an output folder has itself


def check_model_file(path: Path) -> None:
    """Refuse what is no Python file, before torch is imported, which takes seconds.

    Raises: InputError.
    """
    expected = "a Python model file"
    check_file(path, expected=expected)
    if path.suffix != ".py":
        fix = "name the .py file; a Hugging Face config is hf:PATH"
        raise InputError.of(str(path), found=f"a file that ends in {path.suffix!r}", expected=expected, fix=fix)


def local_files(model_file: Path) -> dict[str, str]:
    """Text of each of these modules, by path relative to the folder of the model file."""
    folder, found, waiting = model_file.parent, dict[str, str](), [model_file]
    while waiting:
        for path in _imported(waiting.pop(), folder):
            name = path.relative_to(folder).as_posix()
            if name in found or path == model_file:
                continue
            found[name] = read_text_file(path)
            waiting.append(path)
    return dict(sorted(found.items()))


def files_beside(model_file: Path) -> dict[str, str]:
    """Likewise, to be written beside a program.

    Raises: InputError where one has the name of a part of the program.
    """
    found = local_files(model_file)
    if clash := next((name for name in found if name.partition("/")[0] in OF_PROGRAM), None):
        raise InputError.of(
            str(model_file),
            found=f"import of {clash}",
            expected="a module that is not called like one of the program: " + ", ".join(OF_PROGRAM),
            fix="rename the module",
        )
    return found


def search_beside(model_file: Path) -> None:
    """Let Python find what lies beside a model file, first and anew, as when it runs that file itself."""
    folder = str(model_file.parent.resolve())
    sys.path[:] = [folder, *(place for place in sys.path if place != folder)]
    for path in local_files(model_file):
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if name.partition(".")[0] not in sys.stdlib_module_names:
            sys.modules.pop(name, None)  # of another folder, or as it was before


def _imported(path: Path, folder: Path) -> Iterator[Path]:
    """Files in the folder that one file imports, with the packages around them."""
    try:
        tree = ast.parse(read_text_file(path))
    except SyntaxError:  # importing it says where
        return
    package = path.relative_to(folder).parent.parts
    for node in ast.walk(tree):
        for parts in _names(node, package):
            yield from _files_of(parts, folder)


def _names(node: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The dotted names that a statement may import, as parts."""
    if isinstance(node, ast.Import):
        yield from (tuple(alias.name.split(".")) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else ()
        home = (*base, *(node.module.split(".") if node.module else ()))
        yield home
        yield from ((*home, alias.name) for alias in node.names)


def _files_of(parts: tuple[str, ...], folder: Path) -> Iterator[Path]:
    for end in range(1, len(parts) + 1):
        place = folder.joinpath(*parts[:end])
        found = next((path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file()), None)
        if found is not None:
            yield found
        elif not place.is_dir():
            return
