"""The check of generated programs, where logits must not be computed whole."""

import importlib
import sys
from typing import Any

from distributed.programs import Row, check_programs


def check_chunked_programs(root: str, rows: list[Row], n_steps: int) -> dict[str, list[Any]]:
    """On one rank, as `check_programs`."""
    sys.path.insert(0, root)
    chunked_loss = importlib.import_module("runtime.stages.chunked_loss")
    chunked_loss._Product.whole = _refuse
    return check_programs(root, rows, n_steps)


def _refuse(product: Any) -> Any:
    raise AssertionError(f"all logits at once, {product.shape}")
