"""Which libraries a model is made of, whose modules may compute otherwise in another version."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from importlib import metadata


def libraries_of(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """(package, version) of what modules of a model import that is built on torch itself; torch is not among them."""
    imported: set[str] = set()
    for node in (node for text in texts for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.add(node.module.partition(".")[0])
    packages = metadata.packages_distributions()
    found = (metadata.distribution(name) for package in imported for name in packages.get(package, ()))
    return tuple(sorted({(d.name, d.version) for d in found if _is_built_on_torch(d)}))


def _is_built_on_torch(distribution: metadata.Distribution) -> bool:
    return any(re.match(r"torch\b", line) for line in distribution.requires or ())
