"""Recomputation is priced by the ops that torch runs again, until all that autograd keeps is there, and by how many
tensors that is."""

import runpy
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.cost.local_segment import local_segment
from autoplan.cost.segment_work import segment_work
from autoplan.cost.work_context import work_contexts
from autoplan.hardware import load_hardware_profile
from autoplan.planning.problem import trace_model
from autoplan.rules import load_rules
from autoplan.runtime.input_pipeline.model_calls import call_model, loss_of
from autoplan.runtime.stages.recompute import apply_recompute
from autoplan.tensor_parallel.sharding import read_sharding

TESTS = Path(__file__).parent
EXAMPLES = TESTS.parent / "examples"
TRACED, RUN = ("linear", "addmm", "mm", "conv2d"), ("addmm", "mm", "convolution")  # products with weights
# Of each, how many of the products in its blocks need not run again.
MODELS = {
    EXAMPLES / "gpt.py": 6,  # a block ends in a product
    EXAMPLES / "llama.py": 6,
    TESTS / "families" / "t5_hf.py": 4,
    TESTS / "families" / "bert_hf.py": 0,  # in a norm
    TESTS / "families" / "resnet.py": 1,  # in a rectifier, but the first segment is a convolution
}


class CountedOps(TorchDispatchMode):
    """Counts ops by name, without their overload."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names[op.overloadpacket.__name__] += 1
        return op(*args, **(kwargs or {}))

    @property
    def n_products(self) -> int:
        return sum(self.names[name] for name in RUN)


def n_products_backward(file, blocks) -> int:
    """Products of a backward pass in which some blocks are recomputed."""
    torch.manual_seed(0)
    given = runpy.run_path(str(file))
    model = given["build_model"]()
    inputs, targets = given["make_batch"](2)
    apply_recompute(model, blocks)
    loss = loss_of(given.get("loss_fn"), call_model(model, inputs), targets)
    with CountedOps() as counted:
        loss.backward()
    return counted.n_products


def local_segments(file):
    """Graph, context, and by kind the segments, on one device in float32."""
    graph = trace_model(file)
    context = work_contexts(graph, load_hardware_profile("dgx_a100_x8"), "fp32", load_rules())(1)
    segments = {}
    for kind, segment in graph.first_of_kind().items():
        layouts = read_sharding(graph, segment, None, degree=1, rules=load_rules(), facts=context.facts)
        segments[kind] = local_segment(context, segment, layouts)
    return graph, context, segments


MODELS_BUT_ONE_AT_NIGHT = [
    pytest.param(file, marks=[pytest.mark.nightly] * (file.stem == "llama"), id=file.stem) for file in MODELS
]


@pytest.mark.parametrize("file", MODELS_BUT_ONE_AT_NIGHT)
def test_what_is_priced_is_what_torch_runs_again(file) -> None:
    graph, context, segments = local_segments(file)
    blocks = [segment for segment in graph.segments if segment.is_block]
    n_expected, n_all = 0, 0
    for block in blocks:
        products = [op.op.target.removeprefix("aten.").split(".")[0] in TRACED for op in segments[block.kind].ops]
        n_expected += sum(products[: segments[block.kind].n_repeated_ops])
        n_all += sum(products)
    names = list(dict.fromkeys(block.module_path for block in blocks))
    assert n_products_backward(file, names) - n_products_backward(file, []) == n_expected
    assert n_all - n_expected == MODELS[file]
    for kind in {block.kind for block in blocks}:
        repeated = segment_work(context, segments[kind], batch_size=2).repeated
        assert repeated.device <= 1 and repeated.host <= 1


def n_kept_forward(file, blocks) -> int:
    """How often autograd keeps a tensor in a forward pass of the blocks."""
    given = runpy.run_path(str(file))
    model = given["build_model"]()
    kept = []

    def keeping(forward):
        def run(*args, **kwargs):
            with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: kept.append(0) or tensor, lambda tensor: tensor
            ):
                return forward(*args, **kwargs)

        return run

    for name in blocks:
        block = model.get_submodule(name)
        block.forward = keeping(block.forward)
    call_model(model, given["make_batch"](2)[0])
    return len(kept)


@pytest.mark.parametrize("file", MODELS_BUT_ONE_AT_NIGHT)
def test_tensors_are_counted_about_as_often_as_autograd_keeps_one(file) -> None:
    graph, _, segments = local_segments(file)
    blocks = [segment for segment in graph.segments if segment.is_block]
    n_counted = sum(segments[block.kind].n_kept_tensors for block in blocks)
    n_kept = n_kept_forward(file, list(dict.fromkeys(block.module_path for block in blocks)))
    assert n_counted == pytest.approx(n_kept, rel=0.25)  # batch norm keeps four tensors more, two are counted
