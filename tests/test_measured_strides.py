"""Blocks are measured with tensors that lie in memory as in the program, and have gradients where they have there."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from autoplan import api, runtime
from autoplan.codegen.parallel_model import parallel_model_text
from autoplan.files import write_folder
from autoplan.measuring_program.generated import generated_builder
from autoplan.measuring_program.own import OwnModel
from autoplan.measuring_program.strides import StageStrides
from autoplan.measuring_program.timing import tensors_of
from autoplan.measuring_program.values import default_dtype, fill_module
from autoplan.rules import load_rules
from autoplan.runtime.input_pipeline.batches import flatten_tensors
from autoplan.runtime.input_pipeline.model_calls import loss_of
from autoplan.space.current_code import one_stage_plan
from autoplan.tracing.trace import call_model

CHECKOUT = Path(__file__).parent.parent
FILES = {path.stem: path for folder in ("tests/families", "examples") for path in (CHECKOUT / folder).glob("*.py")}
QUICK = ("diffusion_transformer", "t5_hf")
NO_MODEL = ("in_your_own_loop", "text_gpt", "data_dependent")  # none that is traced, or none without data
BATCH = 3
CPU = torch.device("cpu")
SMALL = {"gpt": {"n_layers": 2}, "llama": {"n_layers": 2}}


def layouts(tensors):
    """What kernels depend on; strides of dims of one element say nothing."""
    return tuple(
        (tuple(stride for extent, stride in zip(t.shape, t.stride(), strict=True) if extent > 1), t.requires_grad)
        for t in tensors
    )


def watched(module, paths):
    """What blocks are called with from now on, and the gradients of what they make, as layouts, by path."""
    found = {path: [] for path in paths}
    for path, calls in found.items():

        def remember(_, arguments, named, outputs, calls=calls):
            given = [*tensors_of(arguments), *tensors_of(named)]
            made = [t for t in tensors_of(outputs) if t.requires_grad and not any(t is one for one in given)]
            gradients = [None] * len(made)
            calls.append((layouts(given), gradients))
            for place, tensor in enumerate(made):

                def keep(gradient, place=place, gradients=gradients):
                    gradients[place] = layouts([gradient])[0]

                tensor.register_hook(keep)

        module.get_submodule(path).register_forward_hook(remember, with_kwargs=True)
    return found


def usual(found, instances):
    calls = ((inputs, tuple(gradients)) for inputs, gradients in (found[path][call] for path, call in instances))
    return Counter(calls).most_common(1)[0][0]


def measured(call, tensors):
    """The same of a call by itself."""
    call.backward(call.forward())
    return layouts(tensors), layouts(call._gradients)


def differences(name, folder):
    """Blocks whose layouts differ from those of the whole model on a CPU: (whose module, path, expected, found)."""
    path, overrides = FILES[name], SMALL.get(name, {})
    files = api.measurement_folder(path, hw="h200_x4", overrides=overrides, degrees=(1,), precision="fp32")
    write_folder(folder, files)
    (folder / "model.py").write_text(path.read_text())
    importlib.invalidate_caches()
    plan = json.loads(files["measurement.json"])
    regions = [region for region in plan["regions"] if region["instances"]]
    graph = api.trace_model(path, overrides=overrides)
    model = importlib.import_module("model")
    torch.manual_seed(0)
    batch, targets = model.make_batch(BATCH)

    whole = model.build_model(**overrides).train()
    paths = {place for region in regions for place, _ in region["instances"]}
    own_found = watched(whole, paths)
    loss_of(getattr(model, "loss_fn", None), call_model(whole, batch), targets).backward()
    own_model = OwnModel(overrides, paths, torch.float32)
    text = parallel_model_text(graph, one_stage_plan(graph, "fp32", 1, "", ()), rules=load_rules())
    generated = ModuleType("generated")
    exec(text.replace("from runtime.", "from autoplan.runtime."), vars(generated))
    with default_dtype(torch.float32):
        stage = generated.Stage0(None).train()
    fill_module(stage, torch.float32, float32_buffers=())
    generated_found = watched(stage, paths)
    outputs = stage(*flatten_tensors(batch))
    generated.loss_fn(outputs, targets, None).backward()
    strides = StageStrides(plan["inputs"], plan["float32_buffers"], torch.float32)
    for region in regions:
        expected = usual(generated_found, region["instances"])
        call = generated_builder(region, BATCH, torch.float32, CPU, None, layout=strides.of(region, BATCH))()
        yield "generated", region["segment"], expected, measured(call, call._arguments)
        # grouped products take 16 bits only on the meta device; nn.Transformer reads a mask, which has no values there
        if name in ("mixture", "torch_transformer"):
            continue
        call = own_model.builder(region["own"], BATCH, CPU, None)()
        given = [*tensors_of(call._arguments), *tensors_of(call._named)]
        yield "own", region["segment"], usual(own_found, region["own"]["instances"]), measured(call, given)


class Turned(nn.Module):
    """Pairs of features, turned by a table of complex numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.polar(torch.ones(2), torch.ones(2)))

    def forward(self, x):
        pairs = torch.view_as_complex(self.linear(x).unflatten(-1, (2, 2)))
        return torch.view_as_real(pairs * self.table).flatten(-2)


def test_own_blocks_are_measured_with_their_complex_buffers(monkeypatch):
    model = SimpleNamespace(build_model=lambda: nn.Sequential(Turned()), make_batch=lambda n: (torch.ones(n, 4), None))
    monkeypatch.setitem(sys.modules, "model", model)
    monkeypatch.setitem(sys.modules, "runtime", runtime)
    own = {"path": "0", "n_calls": 1, "instances": [("0", 0)]}
    call = OwnModel({}, {"0"}, torch.float32).builder(own, BATCH, CPU, None)()
    assert [output.shape for output in call.forward()] == [(BATCH, 4)]
    assert call.module.table.dtype == torch.complex64


def modules_of_folder():
    roots = ("model", "runtime", "segments_0", "measuring_program")
    return [name for name in sys.modules if name.split(".")[0] in roots]


def check(name, folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    for module in modules_of_folder():  # of another test
        monkeypatch.delitem(sys.modules, module)
    try:
        found = list(differences(name, folder))
    finally:
        for module in modules_of_folder():
            del sys.modules[module]
    assert found
    assert [row for row in found if row[2] != row[3]] == []
    return found


def test_transposed_inputs_and_dense_gradients_are_measured_as_such(tmp_path, monkeypatch) -> None:
    found = check("diffusion_transformer", tmp_path / "folder", monkeypatch)
    assert {whose for whose, *_ in found} == {"generated", "own"}
    for _, path, _, (inputs, gradients) in found:
        if path == "blocks.0":  # [sample, token, width] that lies in memory as [sample, width, token]; its gradient not
            assert ((512, 1, 16), True) in inputs and gradients == (((512, 32, 1), False),)


def test_a_mask_for_all_samples_and_a_transposed_bias_are_measured_as_such(tmp_path, monkeypatch) -> None:
    found = {(whose, path): given for whose, path, _, given in check("t5_hf", tmp_path / "folder", monkeypatch)}
    mask = found["generated", "decoder.block.1"][0][1]
    assert mask[0][0] == 0 and not mask[1]  # one mask, of 8 queries by 8 keys, that all samples share
    bias = found["own", "encoder.block.1"][0][1]
    assert bias == ((1, 64, 4), True)  # [1, heads, queries, keys] that lies in memory as [queries, keys, heads]


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(set(FILES) - {*QUICK, *NO_MODEL}))
def test_blocks_of_every_family_see_the_same_strides_and_gradients_when_measured(name, tmp_path, monkeypatch) -> None:
    check(name, tmp_path / "folder", monkeypatch)
