"""Model FLOPs, of which MFU is made, against those that torch counts in a forward and a backward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autoplan.analysis.model_flops import flops_per_sample
from autoplan.tracing.model_source import model_source, module_source
from autoplan.tracing.trace import example_batch, trace_model
from autoplan.units import format_share

ROOT = Path(__file__).parent.parent
FAMILIES = ROOT / "tests" / "families"
GPT = ROOT / "examples" / "gpt.py"
GPT_SIZES = {"n_layers": 2, "n_heads": 4, "width": 32, "context": 16}
N_SAMPLES = 2


def counted_flops(source) -> float:
    """Of one sample, forward and backward, by torch."""
    batch = example_batch(source, N_SAMPLES)
    model, loss_fn = source.build_model(), source.loss_fn
    inputs, targets = batch
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        outputs = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        (outputs if loss_fn is None else loss_fn(outputs, targets)).backward()
    return counter.get_total_flops() / N_SAMPLES


@pytest.mark.parametrize(
    "family",
    [
        "vit_hf",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("resnet", "unet", "diffusion_transformer")),
    ],
)
def test_model_flops_are_those_that_torch_counts(family: str) -> None:
    source = model_source(FAMILIES / f"{family}.py", {})
    assert flops_per_sample(trace_model(source)) == counted_flops(source)


@pytest.mark.parametrize(
    ("file", "sizes", "n_layers"), [(GPT, GPT_SIZES, 2), (FAMILIES / "gpt2_hf.py", {}, 4)], ids=["gpt", "gpt2_hf"]
)
def test_a_causal_mask_halves_attention_which_torch_counts_whole(
    file: Path, sizes: dict[str, int], n_layers: int
) -> None:
    source = model_source(file, sizes)
    # layers x (scores and values) x (forward + twice that backward) x 2 x tokens^2 x width, half of it
    halved = n_layers * 2 * 3 * 2 * 16 * 16 * 32 // 2
    assert flops_per_sample(trace_model(source)) == counted_flops(source) - halved


def test_a_frozen_weight_has_no_gradient_to_compute(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text(
        "import torch\n"
        "def build_model():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))\n"
        "    model[1].weight.requires_grad_(False)\n"
        "    return model\n"
        "def make_batch(n):\n    return torch.randn(n, 8), torch.randn(n, 8)\n"
        "def loss_fn(outputs, targets):\n    return (outputs - targets).square().mean()\n"
    )
    # 2 x 8 x 8 FLOPs each: the first without the gradient of its input, the second without that of its weight
    assert flops_per_sample(trace_model(model_source(file, {}))) == 2 * 8 * 8 * (2 + 2 + 3)


def test_an_einsum_of_one_tensor_is_no_product() -> None:
    class Folding(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("bd->b", torch.einsum("bhw->bwh", super().forward(x)).flatten(1))

    source = module_source(Folding(8, 8), (torch.zeros(2, 4, 8), torch.zeros(2)), nn.functional.mse_loss)
    assert flops_per_sample(trace_model(source)) == 2 * 4 * 8 * 8 * 2  # of the layer, whose input has no gradient


def test_little_use_does_not_read_as_none() -> None:
    assert [format_share(share) for share in (0.543, 0.01, 0.0018, 0.000_18, 0.0)] == [
        "54%",
        "1%",
        "0.18%",
        "0.018%",
        "0%",
    ]
