"""torch.export -> OpGraph: exact for every batch and precision, folded, and clear about what it cannot follow."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from autoplan.errors import InputError, TraceError
from autoplan.graph import PerSample, Ref, Symbol, TensorSpec, graph_from_json, graph_to_json, invariant_values
from autoplan.trace import load_model_file, model_source, module_source, trace_model

EXAMPLES = Path(__file__).parent.parent / "examples"


def trace_example(name, **overrides):
    return trace_model(model_source(EXAMPLES / name, overrides))


@pytest.fixture(scope="module")
def gpt():
    return trace_example("gpt.py", n_layers=3, n_heads=2, width=16, context=8)


def test_every_size_that_grows_with_the_batch_is_per_sample_and_every_other_is_a_number(gpt):
    specs = gpt.specs()
    assert specs["inputs"] == TensorSpec((PerSample(1), 8), "int64")
    assert specs["linear"] == TensorSpec((PerSample(1), 8, 48), "compute")
    # flatten(0, 1) of [batch, 8, 128]
    assert specs["flatten"] == TensorSpec((PerSample(8), 128), "compute")
    assert specs["linear"].at(5) == (5, 8, 48)


def test_blocks_fold_to_one_kind_and_what_stands_between_them_has_its_own():
    graph = trace_example("gpt.py", n_layers=3, n_heads=2, width=16, context=8)
    assert [s.name for s in graph.segments] == ["outer.0", "blocks.0", "blocks.1", "blocks.2", "outer.1"]
    assert [s.kind for s in graph.segments] == [0, 1, 1, 1, 2]
    assert [s.class_name for s in graph.segments] == ["", "Block", "Block", "Block", ""]


def test_a_block_of_another_width_is_another_kind():
    class Uneven(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    source = module_source(Uneven(), (torch.zeros(2, 4), torch.zeros(2, 8)), nn.functional.mse_loss)
    kinds = [s.kind for s in trace_model(source).segments if s.is_block]
    assert kinds == [0, 1, 1, 2]  # the first reads the batch, which has no gradient


def test_tied_weights_are_one_parameter_with_both_names(gpt):
    (tied,) = [p for p in gpt.parameters if len(p.aliases) > 1]
    assert tied.aliases == ("tokens.weight", "head.weight")
    readers = [s.name for s in gpt.segments if tied.name in s.parameters]
    assert readers == ["outer.0", "outer.1"]
    # 3 layers x (48*16+48 + 16*16+16 + 64*16+64 + 64*16+16 + 4*16) + 128*16 + 8*16 + 2*16
    assert gpt.n_parameters() == 3 * (816 + 272 + 1088 + 1040 + 64) + 2048 + 128 + 32


def test_a_cast_to_the_models_own_dtype_is_compute_and_a_cast_to_float32_stays():
    graph = trace_example("llama.py", n_layers=1, context=8)
    casts = {op.args[1] for op in graph.ops if op.target == "aten.to.dtype"}
    assert casts == {Symbol("dtype:compute")}
    assert graph.specs()["cos"].dtype == "float32"


def test_rotary_tables_are_invariant_and_positions_of_tokens_are_not(gpt):
    llama = trace_example("llama.py", n_layers=1, context=8)
    assert {"cos", "sin"} <= invariant_values(llama)
    assert "embedding" not in invariant_values(llama)
    assert "arange" in invariant_values(gpt)


def test_model_outputs_are_the_models_own_even_when_the_loss_broadcasts():
    graph = trace_example("mlp.py", width=8, depth=2)
    (output,) = graph.model_outputs
    assert next(op for op in graph.ops if op.name == output).module_path == "head"


def test_graph_reads_back_as_it_was_written(gpt):
    assert graph_from_json(graph_to_json(gpt)) == gpt
    assert gpt.ops[1].input_names() == ("tokens.weight", "inputs")
    assert Ref("inputs") in gpt.ops[1].args


def test_a_live_module_gives_the_same_ops_as_its_file(gpt):
    module = load_model_file(EXAMPLES / "gpt.py")
    model = module.build_model(n_layers=3, n_heads=2, width=16, context=8)
    graph = trace_model(module_source(model, module.make_batch(2), module.loss_fn))
    assert graph.ops == gpt.ops
    assert graph.segments == gpt.segments
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def write(tmp_path, text):
    path = tmp_path / "model.py"
    path.write_text("import torch\nfrom torch import nn\n" + text)
    return path


MAKE_BATCH = "def make_batch(n):\n    return torch.zeros(n, 4), torch.zeros(n, 4)\n"
LOSS = "def loss_fn(outputs, targets):\n    return (outputs - targets).square().mean()\n"


def test_a_branch_on_data_is_a_trace_error_with_the_users_line(tmp_path):
    path = write(
        tmp_path,
        "class Model(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if x.sum() > 0:\n"
        "            return super().forward(x)\n"
        "        return x\n"
        "def build_model():\n    return Model(4, 4)\n" + MAKE_BATCH + LOSS,
    )
    with pytest.raises(TraceError) as error:
        trace_model(model_source(path, {}))
    assert f"{path}:5" in str(error.value)
    assert "torch.cond" in str(error.value)


def test_a_model_file_without_build_model_names_what_it_has(tmp_path):
    path = write(tmp_path, "def create():\n    pass\n")
    with pytest.raises(InputError, match=r"build_model: found 'functions: create'"):
        load_model_file(path)


def test_an_error_while_importing_names_file_and_line(tmp_path):
    path = write(tmp_path, "\nraise RuntimeError('no such thing')\n")
    with pytest.raises(InputError, match=r"RuntimeError: no such thing \(line 4\)"):
        load_model_file(path)


def test_an_unknown_override_shows_the_signature():
    with pytest.raises(InputError, match=r"build_model\(width: int = 256"):
        trace_example("mlp.py", breadth=4)


def test_a_batch_whose_first_dim_is_not_the_batch_is_refused(tmp_path):
    path = write(
        tmp_path,
        "def build_model():\n    return nn.Linear(4, 4)\n"
        "def make_batch(n):\n    return torch.zeros(4, n), torch.zeros(n, 4)\n" + LOSS,
    )
    with pytest.raises(InputError, match=r"first dim = batch size"):
        trace_model(model_source(path, {}))


def test_a_loss_that_is_no_scalar_is_refused(tmp_path):
    path = write(
        tmp_path,
        "def build_model():\n    return nn.Linear(4, 4)\n" + MAKE_BATCH + "def loss_fn(o, t):\n    return o - t\n",
    )
    with pytest.raises(InputError, match="a floating-point scalar"):
        trace_model(model_source(path, {}))


def test_no_weight_is_allocated_for_a_model_of_70_billion_parameters():
    code = (
        "import resource\nfrom pathlib import Path\n"
        "from autoplan.trace import model_source, trace_model\n"
        f"graph = trace_model(model_source(Path({str(EXAMPLES / 'llama.py')!r}), {{'size': '70b', 'n_layers': 4}}))\n"
        "print(graph.n_parameters(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    n_parameters, peak_kib = map(int, done.stdout.split())
    # 4 of 80 layers: 4 * 0.856e9 + 2 * 1.05e9 parameters would take 22 GB in float32
    assert n_parameters > 5e9
    assert peak_kib * 1024 < 2e9
