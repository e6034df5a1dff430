"""torch.export -> OpGraph: exact for every batch and precision, folded, and clear about what it cannot follow."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from autoplan.errors import InputError, TraceError
from autoplan.graph import PerSample, Ref, Symbol, TensorSpec, graph_from_json, graph_to_json, invariant_values
from autoplan.tracing.second_names import SECOND_NAMES
from autoplan.tracing.trace import ModelSource, load_model_file, model_source, module_source, trace_model

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


TOKENS = 300  # more than bfloat16 can count


class Masked(nn.Module):
    """Attention of x: [batch, 1, TOKENS, 4] with the mask that a function of (model, x) makes."""

    def __init__(self, make_mask):
        super().__init__()
        self.make_mask = make_mask
        self.linear = nn.Linear(4, 4)
        self.register_buffer("ones", torch.ones(TOKENS, dtype=torch.bool))

    def forward(self, x):
        mask = self.make_mask(self, x)
        return nn.functional.scaled_dot_product_attention(self.linear(x), x, x, attn_mask=mask, scale=0.5)


def traced_attention(make_mask):
    """The arguments behind q, k and v, and the operators of the graph."""
    x = torch.zeros(2, 1, TOKENS, 4)
    graph = trace_model(module_source(Masked(make_mask), (x, x), nn.functional.mse_loss))
    (attention,) = [op for op in graph.ops if "attention" in op.target]
    assert dict(attention.kwargs) == {"scale": 0.5}
    return attention.args[3:], [op.target for op in graph.ops]


def positions(x):
    return torch.arange(TOKENS, device=x.device)


def distance(x):
    """Query position minus key position: [TOKENS, TOKENS]."""
    return positions(x)[:, None] - positions(x)[None, :]


def additive(keeps, least):
    return torch.where(keeps, 0.0, least)


def of_samples(model, x):
    """Whether a sample is not the third: [batch, 1, 1, TOKENS]."""
    return (torch.arange(x.shape[0], device=x.device) != 2)[:, None, None, None].expand(-1, 1, 1, TOKENS)


@pytest.mark.parametrize(
    "make_mask",
    [
        lambda model, x: (positions(x) >= 0).expand(x.shape[0], 1, TOKENS, TOKENS),
        lambda model, x: torch.ones_like(x[:, :, :, :1], dtype=torch.bool),  # reads nothing of x but its shape
        lambda model, x: torch.zeros(TOKENS, TOKENS, dtype=x.dtype, device=x.device),
    ],
)
def test_a_mask_that_keeps_every_score_is_no_mask_and_nothing_makes_it(make_mask):
    options, targets = traced_attention(make_mask)
    assert options == ()
    assert targets[:2] == ["aten.linear.default", "aten.scaled_dot_product_attention.default"]


@pytest.mark.parametrize(
    "make_mask",
    [
        lambda model, x: distance(x) >= 0,
        lambda model, x: (distance(x) >= 0).expand(x.shape[0], 1, TOKENS, TOKENS),
        lambda model, x: (distance(x) >= 0) & (distance(x) < TOKENS),  # a window as long as the text
        lambda model, x: additive(distance(x) >= 0, float("-inf")).to(x.dtype),
        lambda model, x: additive(distance(x) >= 0, torch.finfo(x.dtype).min).to(x.dtype),
    ],
)
def test_a_mask_that_drops_what_is_to_come_is_is_causal(make_mask):
    options, targets = traced_attention(make_mask)
    assert options == (None, 0.0, True)
    assert targets[:2] == ["aten.linear.default", "aten.scaled_dot_product_attention.default"]


@pytest.mark.parametrize(
    "make_mask",
    [
        pytest.param(lambda model, x: (distance(x) >= 0) & (distance(x) < 8), id="window"),
        pytest.param(lambda model, x: distance(x) <= 0, id="upper triangle"),
        pytest.param(lambda model, x: additive(distance(x) >= 0, -100.0).to(x.dtype), id="drops little"),
        pytest.param(lambda model, x: (distance(x) * 0.1).to(x.dtype), id="bias by distance"),
        # from 256 on bfloat16 has even numbers only
        pytest.param(
            lambda model, x: ((positions(x).to(x.dtype) % 2 == 0) | (positions(x) < 256))[None], id="true by rounding"
        ),
        pytest.param(of_samples, id="differs at batch 3"),
        pytest.param(lambda model, x: x[..., 0].unsqueeze(2) >= 0, id="reads the batch"),
        pytest.param(lambda model, x: model.ones[None], id="reads a buffer"),
        pytest.param(lambda model, x: (model.linear.weight.sum() * 0 == 0).expand(1, TOKENS), id="reads a parameter"),
        pytest.param(lambda model, x: torch.rand(1, TOKENS, device=x.device) >= 0, id="random"),
        pytest.param(
            lambda model, x: torch.empty_strided((1, TOKENS), (TOKENS, 1), device=x.device).long() * 0 == 0,
            id="memory as it lay",
        ),
    ],
)
def test_any_other_mask_stays(make_mask):
    (mask,), _ = traced_attention(make_mask)
    assert isinstance(mask, Ref)


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


def test_a_forward_that_takes_other_arguments_than_the_inputs_says_how_they_are_given(tmp_path):
    model = "class Net(nn.Module):\n    def forward(self, batch):\n        return batch['x'].mean()\n"
    make_batch = "def make_batch(n):\n    return {'x': torch.zeros(n, 4)}, None\n"
    path = write(tmp_path, model + "def build_model():\n    return Net()\n" + make_batch)
    with pytest.raises(TraceError, match=r"unexpected keyword argument 'x'(.|\n)*model\(\*\*inputs\) of a dict"):
        trace_model(model_source(path, {}))


def test_no_weight_is_allocated_for_a_model_of_70_billion_parameters():
    code = (
        "import resource\nfrom pathlib import Path\n"
        "from autoplan.tracing.trace import model_source, trace_model\n"
        f"graph = trace_model(model_source(Path({str(EXAMPLES / 'llama.py')!r}), {{'size': '70b', 'n_layers': 4}}))\n"
        "print(graph.n_parameters(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    n_parameters, peak_kib = map(int, done.stdout.split())
    # 4 of 80 layers: 4 * 0.856e9 + 2 * 1.05e9 parameters would take 22 GB in float32
    assert n_parameters > 5e9
    assert peak_kib * 1024 < 2e9


def test_a_make_batch_that_takes_no_batch_size_is_not_blamed_on_a_file_of_ours(tmp_path):
    model = "def build_model():\n    return nn.Linear(4, 4)\n"
    path = write(tmp_path, model + MAKE_BATCH.replace("make_batch(n)", "make_batch()") + LOSS)
    with pytest.raises(InputError, match="make_batch failed") as raised:
        trace_model(model_source(path, {}))
    assert "user_errors.py" not in str(raised.value)


LINEAR = "def build_model():\n    return nn.Linear(4, 4)\n"


def test_a_loss_that_fails_is_named_with_its_line(tmp_path):
    path = write(
        tmp_path, LINEAR + MAKE_BATCH + "def loss_fn(outputs, targets):\n    return outputs @ targets.mean()\n"
    )
    with pytest.raises(TraceError, match=r"loss_fn fails at .*\.py:\d+: return outputs @ targets.mean\(\)"):
        trace_model(model_source(path, {}))


def test_a_loss_of_a_library_that_fails_is_told_from_the_model(tmp_path):
    path = write(tmp_path, LINEAR + MAKE_BATCH + "loss_fn = nn.NLLLoss()\n")
    with pytest.raises(TraceError, match=r"loss_fn fails\n(.|\n)*fix: call loss_fn on the outputs"):
        trace_model(model_source(path, {}))


@pytest.mark.parametrize("second", SECOND_NAMES)
def test_a_second_name_of_an_operator_takes_the_same_arguments_as_the_first(second):
    packet, first = getattr(torch.ops.aten, second), getattr(torch.ops.aten, SECOND_NAMES[second])
    overloads = [
        name for name in packet.overloads() if "out" not in name and not name.lower().startswith(("names", "dimname"))
    ]
    assert overloads
    for name in overloads:
        own, other = (getattr(op, name)._schema for op in (packet, first))
        assert [(a.name, str(a.type), a.default_value) for a in own.arguments] == [
            (a.name, str(a.type), a.default_value) for a in other.arguments
        ]


def test_second_names_are_traced_as_the_first():
    def loss_fn(outputs, targets):
        joined = torch.concatenate([torch.multiply(outputs, 2.0), torch.subtract(outputs, targets)], dim=1)
        return torch.clip(torch.divide(joined, 3.0), -1.0, 1.0).mean()

    x = torch.zeros(2, 4)
    targets = [op.target for op in trace_model(module_source(nn.Linear(4, 4), (x, x), loss_fn)).ops]
    assert [name.split(".")[1] for name in targets] == ["linear", "mul", "sub", "cat", "div", "clamp", "mean"]


def model_text(forward):
    return (
        f"class Model(nn.Linear):\n    def forward(self, x):\n        {forward}\n"
        "def build_model():\n    return Model(4, 4)\n" + MAKE_BATCH
    )


def test_a_loop_over_samples_is_named_with_its_line_and_operator(tmp_path):
    path = write(
        tmp_path, model_text("return torch.stack([super(Model, self).forward(y) for y in x.unbind(0)])") + LOSS
    )
    with pytest.raises(
        TraceError, match=r"at batch 3 at .*\.py:5: return torch.stack(.|\n)*found: aten.unbind.int both"
    ):
        trace_model(model_source(path, {}))


def test_a_tensor_made_on_another_device_is_told_where_to_be_made(tmp_path):
    path = write(tmp_path, model_text("return super().forward(x) + torch.zeros(4, device='cpu')") + LOSS)
    with pytest.raises(TraceError, match=r"at .*\.py:5: return (.|\n)*fix: make this tensor with device=x.device"):
        trace_model(model_source(path, {}))


def test_an_output_of_a_class_that_torch_does_not_know_says_to_leave_it_out(tmp_path):
    text = "class Cache:\n    pass\n" + model_text("return super().forward(x), Cache()")
    path = write(tmp_path, text + "def loss_fn(outputs, targets):\n    return outputs[0].mean()\n")
    with pytest.raises(TraceError, match=r"Cache(.|\n)*fix: return only what the loss reads; .* use_cache=False"):
        trace_model(model_source(path, {}))


def test_a_package_that_a_model_file_lacks_is_named_with_how_to_get_it(tmp_path):
    with pytest.raises(InputError, match="fix: pip install no_such_package"):
        load_model_file(write(tmp_path, "import no_such_package\n"))


def test_a_module_beside_the_model_file_is_not_to_be_installed(tmp_path):
    (tmp_path / "my_layers.py").write_text("")
    with pytest.raises(InputError, match=f"fix: it lies beside the file: run PYTHONPATH={tmp_path} autoplan"):
        load_model_file(write(tmp_path, "import my_layers\n"))


def _ctc(lengths):
    """The loss of 8 frames with lengths as this function of targets gives them."""

    def loss_fn(outputs, targets):
        log_probs = outputs.log_softmax(-1).transpose(0, 1)
        return nn.functional.ctc_loss(log_probs, targets, *lengths(targets))

    batch = (torch.zeros(2, 8, 4), torch.ones(2, 3, dtype=torch.int64))
    return module_source(nn.Linear(4, 6), batch, loss_fn)


def test_ctc_is_traced_though_its_states_depend_on_the_labels():
    graph = trace_model(_ctc(lambda targets: (targets[:, 0] * 8, targets[:, 0] * 3)))
    assert [op.target for op in graph.ops][-1] == "aten.ctc_loss.Tensor"


def test_a_loss_whose_shape_depends_on_values_names_the_ways_out():
    with pytest.raises(TraceError, match="DynamicOutputShape") as error:
        trace_model(_ctc(lambda targets: ([8] * len(targets), [3] * len(targets))))
    assert "--module-level" in str(error.value)


@pytest.mark.parametrize("n_targets", [0, 2])
def test_what_is_no_tensor_in_a_batch_is_no_input(n_targets):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, scale):
            return (self.linear(x) * scale).square().mean()

    def make_batch(batch_size):
        targets = tuple(torch.zeros(batch_size) for _ in range(n_targets)) or None
        return (torch.zeros(batch_size, 4), 2.0), targets

    graph = trace_model(ModelSource(name="own", where="own", build_model=Own, make_batch=make_batch, loss_fn=None))
    assert [item.path for item in graph.inputs][0] == ("inputs", 0)
    assert len(graph.inputs) == 1 + n_targets
