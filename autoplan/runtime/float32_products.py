"""How GPUs multiply float32: as it is, or with operands rounded to tf32, which is several times as fast."""

from __future__ import annotations

import torch


def set_float32_products(precision: str) -> None:
    """Products and convolutions of this process: rounded under "tf32" only. By itself torch rounds in convolutions."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
