"""What fused attention is priced at on a GPU: against what it took, by length, width and precision."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from autoplan.cost.op_time import op_time
from autoplan.graph import COMPUTE, Op, PerSample, Ref, TensorSpec
from autoplan.hardware import attention_of, load_hardware_profile
from autoplan.rules import LocalCall, load_rules

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
RULE = load_rules()["aten.scaled_dot_product_attention.default"]
H200 = load_hardware_profile("h200_x4").device


def attention(heads, key_heads, tokens, head_dim, is_causal):
    """A call of one op, and its operands; the first dim is the batch."""
    q, k = (TensorSpec((PerSample(1), n, tokens, head_dim), COMPUTE) for n in (heads, key_heads))
    refs = tuple(Ref(name) for name in "qkv")
    kwargs = (("enable_gqa", True),) if key_heads != heads else ()
    args = (*refs, None, 0.0, is_causal)
    return Op("y", "aten.scaled_dot_product_attention.default", args, kwargs, (q,), "", ""), (q, k, k)


def seconds(op, operands, batch_size, *, device=H200, precision="bf16"):
    call = LocalCall(op, operands, operands, op.outputs, batch_size, precision, attention=device.attention)
    return op_time(RULE, call, device=device, has_gradient=True)


def rows(name):
    found = [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]
    return [row for row in found if row["op"] == "attention"]


@pytest.mark.parametrize("name", ["attention_rates_h200_2026-11-25.jsonl", "attention_rates_h100_2026-11-25.jsonl"])
def test_attention_of_197_to_65536_tokens_takes_what_it_took(name):
    errors = []
    for row in rows(name):
        n, *shape = row["shape"]
        found = seconds(*attention(*shape), n)
        errors += [math.log(found.forward_s / row["forward_s"]), math.log(found.backward_s / row["backward_s"])]
    assert len(errors) == 120
    assert statistics.mean(map(abs, errors)) < 0.09
    assert abs(statistics.mean(errors)) < 0.05


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_in_32_bits_attention_is_as_slow_whatever_products_are_rounded_to(precision):
    for row in rows("in_32_bits_h200_2026-11-25.jsonl"):
        if row["L"] >= 512 and row["D"] == 64 and row["tf32"] is (precision == "tf32"):
            op, operands = attention(row["H"], row["H"], row["L"], row["D"], row["causal"])
            found = seconds(op, operands, row["B"], precision=precision)
            assert found.forward_s == pytest.approx(row["forward_ms"] / 1e3, rel=0.15)
            assert found.backward_s == pytest.approx(row["backward_ms"] / 1e3, rel=0.15)


@pytest.mark.parametrize(
    ("key_heads", "precision", "is_kept"), [(8, "tf32", True), (8, "bf16", False), (32, "tf32", False)]
)
def test_scores_are_kept_where_no_kernel_takes_fewer_key_heads(key_heads, precision, is_kept):
    # Llama-1B, 2 x 4096 tokens, tf32: 16 blocks kept 64 GiB more than was predicted before they were counted
    op, operands = attention(32, key_heads, 4096, 64, True)
    scores_bytes = 2 * 32 * 4096 * 4096 * 4
    kept_bytes = RULE.extra_saved_bytes(op, operands, 2, precision)
    assert kept_bytes == (scores_bytes if is_kept else 2 * 32 * 4096 * 4)
    fused = seconds(*attention(32, 32, 4096, 64, True), 2, precision=precision)
    found = seconds(op, operands, 2, precision=precision)
    assert (found.moved_bytes > fused.moved_bytes + 12 * scores_bytes) is is_kept


def test_only_hopper_and_later_have_attention_of_cudnn():
    names = {"NVIDIA H100 80GB HBM3": "cudnn", "NVIDIA GH200 480GB": "cudnn", "NVIDIA B200": "cudnn", "CPU": "cpu"}
    names |= {"NVIDIA A100-SXM4-80GB": "flash", "Tesla V100-SXM2-32GB": "flash", "NVIDIA L40S": "flash"}
    assert {name: attention_of(name) for name in names} == names
    op, operands = attention(32, 32, 32768, 64, True)
    other = seconds(op, operands, 1, device=replace(H200, attention="flash"))
    assert seconds(op, operands, 1).forward_s < 0.9 * other.forward_s
