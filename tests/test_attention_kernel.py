"""Which kernel attention runs: what torch chooses on a CPU, and what prices and recomputation say of it everywhere."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from autoplan.analysis.attention_kernel import kernel_of
from autoplan.analysis.kept_attention import is_fused_attention
from autoplan.graph import COMPUTE, GraphFacts, Op, PerSample, Ref, TensorSpec
from autoplan.rules import LocalCall, load_rules

RULE = load_rules()["aten.scaled_dot_product_attention.default"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
PLAIN = ((4, 64, 16),) * 3
GROUPED = ((4, 64, 16), (2, 64, 16), (2, 64, 16))
OTHER_VALUES = ((4, 64, 16), (4, 64, 16), (4, 64, 24))
BATCH_SIZE = 2


def call_of(
    shapes=PLAIN,
    *,
    mask=None,
    precision="fp32",
    attention="cpu",
    has_gradient=False,
    is_scattered=False,
    dropout_p=0.0,
    causal=False,
):
    """A call on these shapes behind the batch, and on a mask without one."""
    operands = tuple(TensorSpec((PerSample(1), *shape), COMPUTE) for shape in shapes)
    operands += () if mask is None else (TensorSpec(mask, COMPUTE),)
    args = (*(Ref(name) for name in "qkv"), None if mask is None else Ref("mask"), dropout_p, causal)
    kwargs = (("enable_gqa", True),) if shapes == GROUPED else ()
    result = TensorSpec((*operands[0].shape[:-1], operands[2].shape[-1]), COMPUTE)
    op = Op("y", "aten.scaled_dot_product_attention.default", args, kwargs, (result,), "", "")
    gradients = (True, True, True, *([] if mask is None else [has_gradient]))
    return LocalCall(
        op,
        operands,
        operands,
        (result,),
        BATCH_SIZE,
        precision,
        attention=attention,
        gradients=gradients,
        scattered=(False, False, False, is_scattered),
    )


def kernel(call):
    return kernel_of(
        call.op,
        call.operands,
        precision=call.precision,
        attention=call.attention,
        mask_has_gradient=any(call.gradients[3:]),
        mask_is_scattered=any(call.scattered[3:]),
    )


def is_fused(call):
    names = ("q", "k", "v", "mask")
    gradients = frozenset(name for name, has_gradient in zip(names, call.gradients, strict=False) if has_gradient)
    facts = GraphFacts(dict(zip(names, call.operands, strict=False)), gradients, gradients, frozenset(), frozenset())
    return is_fused_attention(call.op, facts, precision=call.precision, attention=call.attention)


def tensors(call):
    """q, k, v and the options of the same call in torch."""
    dtype = DTYPES[call.precision]
    *parts, mask = [
        torch.randn(spec.at(BATCH_SIZE), dtype=dtype, requires_grad=has_gradient)
        for spec, has_gradient in zip(call.operands, call.gradients, strict=True)
    ] + [None] * (4 - len(call.operands))
    options = {"attn_mask": mask, "dropout_p": call.op.args[4], "is_causal": call.op.args[5]}
    return parts, options | dict(call.op.kwargs)


CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "fewer key heads": {"shapes": GROUPED},
    "fewer key heads and a mask": {"shapes": GROUPED, "mask": (64, 64)},
    "one key head without saying so": {"shapes": ((4, 64, 16), (1, 64, 16), (1, 64, 16))},
    "values of another size": {"shapes": OTHER_VALUES},
    "three dims": {"shapes": ((64, 16),) * 3},
    "mask": {"mask": (64, 64)},
    "mask of four dims": {"mask": (1, 1, 64, 64)},
    "mask of three dims": {"mask": (4, 64, 64)},
    "mask with a gradient": {"mask": (64, 64), "has_gradient": True},
    "dropout": {"dropout_p": 0.5},
}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_on_a_cpu_it_is_the_kernel_that_torch_chooses(name: str, precision: str) -> None:
    call = call_of(**CALLS[name], precision=precision)
    parts, options = tensors(call)
    is_math = torch._fused_sdp_choice(*parts, **options) == SDPBackend.MATH.value
    assert kernel(call) == ("math" if is_math else "cpu")


@pytest.mark.parametrize(
    ("kernels", "way", "expected"),
    [
        ("cudnn", {}, "cudnn"),
        ("cudnn", {"mask": (64, 64)}, "cudnn"),
        ("cudnn", {"shapes": GROUPED}, "cudnn"),
        ("cudnn", {"shapes": GROUPED, "mask": (64, 64)}, "cudnn"),
        ("cudnn", {"mask": (64, 64), "has_gradient": True}, "efficient"),
        ("cudnn", {"mask": (64, 64), "is_scattered": True}, "math"),
        ("flash", {"mask": (64, 64), "is_scattered": True}, "math"),
        ("flash", {}, "flash"),
        ("flash", {"shapes": GROUPED}, "flash"),
        ("flash", {"mask": (64, 64)}, "efficient"),
        ("flash", {"shapes": OTHER_VALUES}, "efficient"),
        ("flash", {"shapes": GROUPED, "mask": (64, 64)}, "math"),
        ("efficient", {}, "efficient"),
        ("efficient", {"shapes": GROUPED}, "math"),
        ("efficient", {"shapes": ((64, 16),) * 3}, "math"),
    ],
)
def test_kernels_of_gpus_in_16_bits(kernels: str, way: dict, expected: str) -> None:
    assert kernel(call_of(**way, precision="bf16", attention=kernels)) == expected


@pytest.mark.parametrize("kernels", ["cudnn", "flash", "efficient", "cpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "mask with a gradient"])
def test_scores_are_kept_and_gone_over_exactly_where_nothing_is_fused(name: str, precision: str, kernels: str) -> None:
    call = call_of(**CALLS[name], precision=precision, attention=kernels)
    n_scores = call.operands[0].n_elements(BATCH_SIZE) // 16 * 64
    has_passes, keeps_scores = any(RULE.further_bytes(call)), RULE.extra_saved_bytes(call) >= 4 * n_scores
    assert is_fused(call) == (not has_passes) == (not keeps_scores)


@pytest.mark.parametrize(
    ("precision", "kernels", "way", "kept_bytes"),
    [
        # 2 x 4 heads of 64 x 64 scores of 8 bytes; 3 dims are 2 heads, of 4 bytes
        ("fp64", "cudnn", {}, 2 * 4 * 64 * 64 * 8),
        ("fp64", "flash", {}, 2 * 4 * 64 * 64 * 8),
        ("fp32", "cudnn", {"shapes": ((64, 16),) * 3}, 2 * 64 * 64 * 4),
        ("fp32", "cpu", {"shapes": ((64, 16),) * 3}, 2 * 64 * 64 * 4),
        ("fp32", "cpu", {"shapes": OTHER_VALUES}, 2 * 4 * 64 * 64 * 4),
        ("fp32", "cpu", {"mask": (64, 64), "has_gradient": True}, 2 * 4 * 64 * 64 * 4),
        # one number for each of 2 x 4 x 64 rows
        ("fp32", "cpu", {"shapes": GROUPED}, 2 * 4 * 64 * 4),
        ("fp32", "cudnn", {"shapes": GROUPED}, 2 * 4 * 64 * 64 * 4),
    ],
)
def test_what_attention_keeps_inside(precision: str, kernels: str, way: dict, kept_bytes: int) -> None:
    assert RULE.extra_saved_bytes(call_of(**way, precision=precision, attention=kernels)) == kept_bytes


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_the_math_kernel_keeps_what_torch_keeps(precision: str, dropout_p: float) -> None:
    call = call_of(((64, 16),) * 3, precision=precision, dropout_p=dropout_p)
    parts, options = tensors(call)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = F.scaled_dot_product_attention(*parts, **options)
    assert result.requires_grad
    assert sum(saved.values()) == RULE.extra_saved_bytes(call) + sum(part.nbytes for part in parts)
