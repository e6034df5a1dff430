"""torch.export -> OpGraph: exact for every batch and precision, folded, and clear about what it cannot follow."""

import subprocess
import sys
from collections import UserDict, namedtuple
from dataclasses import dataclass, replace

import numpy
import pytest
import torch
from model_texts import EXAMPLES, LOSS, MAKE_BATCH, model_text, trace_example, write
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.errors import InputError, TraceError
from autoplan.graph import PerSample, Ref, Symbol, TensorSpec, graph_from_json, graph_to_json, invariant_values
from autoplan.runtime.building.construction import build_whole_model
from autoplan.runtime.building.known_values import KnownValues, build_on_meta
from autoplan.tracing.model_source import ModelSource, load_model_file, model_source, module_source
from autoplan.tracing.module_level import trace_modules
from autoplan.tracing.overlaid_graph import input_path
from autoplan.tracing.second_names import SECOND_NAMES
from autoplan.tracing.trace import trace_model


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


class Shared(nn.Module):
    """A layer that stands twice in one container, and in a container of containers."""

    def __init__(self):
        super().__init__()
        first, second = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.layers = nn.ModuleList([first, second, first])
        self.groups = nn.ModuleList([nn.ModuleList([first]), nn.ModuleList([second])])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        for (layer,) in self.groups:
            x = layer(x)
        return x


def test_a_block_that_stands_at_several_places_is_called_again_at_the_first():
    source = module_source(Shared(), (torch.zeros(2, 4), torch.zeros(2, 4)), nn.functional.mse_loss)
    blocks = [segment for segment in trace_model(source).segments if segment.is_block]
    assert {segment.module_path for segment in blocks} == {"layers.0", "layers.1"}
    assert [name for segment in blocks for name in segment.parameters][:2] == ["layers.0.0.weight", "layers.0.0.bias"]


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


class Turned(nn.Module):
    """Pairs of features, turned by a table of complex numbers."""

    def __init__(self, hold):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        hold(self, torch.polar(torch.ones(2), torch.arange(2.0)))

    def forward(self, x):
        pairs = torch.view_as_complex(self.linear(x).float().unflatten(-1, (2, 2)))
        return torch.view_as_real(pairs * self.table).flatten(-2).type_as(x)


def turned(hold):
    return module_source(Turned(hold), (torch.zeros(2, 4), torch.zeros(2, 4)), nn.functional.mse_loss)


def test_a_complex_buffer_stays_complex():
    def hold(model, table):
        model.register_buffer("table", table)

    assert trace_model(turned(hold)).specs()["table"] == TensorSpec((2,), "complex64")
    for dtype in (torch.float32, torch.float64):
        built = build_whole_model(lambda: Turned(hold), seed=0, dtype=dtype, device=torch.device("cpu"))
        assert torch.equal(built.table, torch.polar(torch.ones(2), torch.arange(2.0)))
        assert built.linear.weight.dtype == dtype


def test_a_complex_parameter_is_refused_with_what_to_keep_instead():
    def hold(model, table):
        model.table = nn.Parameter(table)

    for trace in (trace_model, trace_modules):
        with pytest.raises(InputError, match="Turned: table"):
            trace(turned(hold))


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


def test_a_field_of_a_named_tuple_is_found_by_its_index():
    pair = namedtuple("pair", "ids mask")
    batch = ({"both": pair(torch.zeros(1), torch.zeros(1))}, [torch.zeros(1)])
    leaves, _ = pytree.tree_flatten_with_path(batch)
    assert [input_path(path, batch) for path, _ in leaves] == [
        ("inputs", "both", 0), ("inputs", "both", 1), ("targets", 0),
    ]  # fmt: skip


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


@pytest.mark.parametrize("trace", [trace_model, trace_modules])
def test_a_part_of_a_sequential_that_fails_is_named(trace, tmp_path):
    parts = "nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(3, 4)))"
    path = write(tmp_path, f"def build_model():\n    return {parts}\n" + MAKE_BATCH + LOSS)
    with pytest.raises(TraceError, match=r", in module 1\.1 \(Linear\)\n  found: "):
        trace(model_source(path, {}))


def test_a_batch_whose_first_dim_is_not_the_batch_is_refused(tmp_path):
    path = write(
        tmp_path,
        "def build_model():\n    return nn.Linear(4, 4)\n"
        "def make_batch(n):\n    return torch.zeros(4, n), torch.zeros(n, 4)\n" + LOSS,
    )
    with pytest.raises(InputError, match=r"first dim = batch size"):
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
        "from autoplan.tracing.model_source import model_source\nfrom autoplan.tracing.trace import trace_model\n"
        f"graph = trace_model(model_source(Path({str(EXAMPLES / 'llama.py')!r}), {{'size': '70b', 'n_layers': 2}}))\n"
        "print(graph.n_parameters(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    n_parameters, peak_kib = map(int, done.stdout.split())
    # 2 of 80 layers: 2 * 0.856e9 + 2 * 1.05e9 parameters would take 15 GB in float32
    assert n_parameters > 3.5e9
    assert peak_kib * 1024 < 2e9


STOCHASTIC_DEPTH = """
class Model(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.rates = {rates}
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in self.rates)

    def forward(self, x):
        for rate, block in zip(self.rates, self.blocks):
            x = x + (1 - rate) * block(x)
        return x

def build_model(depth=3):
    return Model(depth)
"""


@pytest.mark.parametrize(
    "rates",
    [
        "[x.item() for x in torch.linspace(0, 0.1, depth)]",
        "[float(x) for x in 0.1 * torch.arange(depth) / 2]",
        "torch.linspace(0, 0.1, depth).tolist()",
        "[x for part in torch.linspace(0, 0.1, depth).split([1, depth - 1]) for x in part.tolist()]",
        "list(torch.linspace(0, 0.1, depth).cpu().numpy())",
    ],
)
def test_build_model_may_read_numbers_that_torch_makes(tmp_path, rates):
    path = write(tmp_path, STOCHASTIC_DEPTH.format(rates=rates) + MAKE_BATCH + LOSS)
    model = model_source(path, {"depth": 6}).build_model()
    assert len(model.rates) == 6 and model.rates[2] == pytest.approx(0.1 * 2 / 5 if "arange" not in rates else 0.1)
    graph = trace_model(model_source(path, {"depth": 3}))
    scales = [op.args[1] for op in graph.ops if op.target == "aten.mul.Tensor"]
    assert scales == pytest.approx([1.0, 0.95, 0.9])
    assert build_on_meta(lambda: load_model_file(path).build_model()).blocks[0].weight.device.type == "meta"


@pytest.mark.parametrize(
    "rates",
    ["[nn.Linear(depth, 4).weight.mean().item()]", "torch.rand(3).tolist()"],
)
@pytest.mark.parametrize("overrides", [{}, {"depth": 6}])
def test_numbers_that_tensors_without_memory_do_not_have_are_refused_with_their_line(tmp_path, rates, overrides):
    path = write(tmp_path, STOCHASTIC_DEPTH.format(rates=rates) + MAKE_BATCH + LOSS)
    with pytest.raises(
        InputError, match=r'\(line 7\)\n  expected: .*torch\.device\("meta"\)(.|\n)*fix: .*device="cpu"'
    ):
        trace_model(model_source(path, overrides))


def test_what_is_written_into_a_known_tensor_is_known_and_what_is_random_makes_it_unknown():
    with torch.device("meta"), KnownValues():
        numbers = torch.zeros(4)
        numbers[1:3] = torch.arange(2.0, 4.0)
        assert numbers.tolist() == [0.0, 2.0, 3.0, 0.0]
        numbers[:2].uniform_()
        with pytest.raises(NotImplementedError, match="meta tensor"):
            numbers.tolist()


@pytest.mark.parametrize("write_into", ["parameter", "data"])
def test_what_is_written_by_another_name_is_known(write_into):
    with torch.device("meta"), KnownValues():
        numbers = torch.zeros(4)
        assert numbers.tolist() == [0.0] * 4
        if write_into == "parameter":
            nn.init.constant_(nn.Parameter(numbers), 0.5)
        else:
            numbers.data = torch.full((4,), 0.5)
        assert numbers.tolist() == [0.5] * 4


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


@pytest.mark.parametrize(
    "freeze", ["self.requires_grad_(False)", "self.weight.requires_grad_(False)", "self.weight.requires_grad = False"]
)
def test_a_parameter_that_is_frozen_within_forward_is_refused_with_what_to_do(tmp_path, freeze):
    path = write(tmp_path, model_text(f"{freeze}; return super().forward(x.requires_grad_())") + LOSS)
    with pytest.raises(TraceError, match="changes requires_grad of parameters(.|\n)*freeze in build_model"):
        trace_model(model_source(path, {}))


def test_a_loop_over_samples_is_named_with_its_line_and_operator(tmp_path):
    path = write(
        tmp_path, model_text("return torch.stack([super(Model, self).forward(y) for y in x.unbind(0)])") + LOSS
    )
    with pytest.raises(
        TraceError, match=r"at batch 3 at .*\.py:5: return torch.stack(.|\n)*found: aten.unbind.int both"
    ):
        trace_model(model_source(path, {}))


def _divided(outputs, n_samples):
    return outputs.square().sum() / n_samples


@pytest.mark.parametrize(
    ("count", "found"),
    [
        (lambda x: len(x) - 1, r"div[\w ]*\(aten.div.Tensor\): a size is 1 for batch 2 and 2 for batch 3"),
        (lambda x: len(x) + 0.5, r"div[\w ]*\(aten.div.Tensor\): a number is 2.5 for batch 2 and 3.5 for batch 3"),
    ],
)
def test_a_number_made_of_the_batch_size_is_named_with_its_line_and_how_to_count(count, found):
    batch = torch.zeros(2, 4), torch.zeros(2, 4)
    source = module_source(nn.Linear(4, 4), batch, lambda outputs, targets: _divided(outputs, count(outputs)))
    line = rf"{__file__}:{_divided.__code__.co_firstlineno + 1}: return outputs.square"
    with pytest.raises(TraceError, match=rf"(?s)depends on the batch size at {line}.*found: {found}.*x.new_ones"):
        trace_model(source)


def test_a_number_read_from_a_tensor_is_named_with_its_line():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * x.sum().item()

    source = module_source(Scaled(4, 4), (torch.zeros(2, 4), torch.zeros(2, 4)), nn.functional.mse_loss)
    line = rf"{__file__}:{Scaled.forward.__code__.co_firstlineno + 1}: return super"
    with pytest.raises(TraceError, match=rf"(?s)on the values of a tensor at {line}.*a number read.*--module-level"):
        trace_model(source)


def test_samples_may_be_counted_by_an_operator():
    batch = torch.zeros(2, 4), torch.zeros(2, 4)
    source = module_source(
        nn.Linear(4, 4), batch, lambda y, _: _divided(y, y.new_ones(len(y), dtype=torch.float32).sum() - 1)
    )
    assert any((PerSample(1),) in op.args for op in trace_model(source).ops)


def autocast_by_a_question(layer, x):
    with torch.autocast(x.device.type, enabled=torch.is_autocast_enabled(x.device.type)):
        return layer(x)


def autocast_off(layer, x):
    with torch.autocast(device_type=x.device.type, enabled=False):
        return layer(x)


@pytest.mark.parametrize("call", [autocast_by_a_question, autocast_off])
def test_autocast_for_the_device_of_a_tensor_is_traced(call):
    class Calling(nn.Linear):
        def forward(self, x):
            return call(super().forward, x)

    source = module_source(Calling(4, 4), (torch.zeros(2, 4), torch.zeros(2, 4)), nn.functional.mse_loss)
    graph = trace_model(source)
    assert "aten.linear.default" in {op.target for op in graph.ops} and graph.dissolved == ()
    with pytest.raises(RuntimeError):
        torch.autocast("meta")


def test_a_forward_that_meta_tensors_alone_fail_is_told_of_modules(tmp_path):
    path = write(tmp_path, model_text("return nn.utils.rnn.pack_sequence([*super().forward(x)]).data") + LOSS)
    with pytest.raises(TraceError, match=r"model.py:5: .*(\n.*)+where nothing does, use --module-level"):
        trace_model(model_source(path, {}))


def test_a_tensor_made_on_another_device_is_told_where_to_be_made(tmp_path):
    path = write(tmp_path, model_text("return super().forward(x) + torch.zeros(4, device='cpu')") + LOSS)
    with pytest.raises(TraceError, match=r"at .*\.py:5: return (.|\n)*fix: make this tensor with device=x.device"):
        trace_model(model_source(path, {}))


def test_a_mask_in_float32_that_meets_the_models_dtype_is_told_to_be_made_in_it():
    class Masked(nn.Module):
        def forward(self, x):
            return (x + torch.zeros(4, 4, device=x.device)) @ x

    source = module_source(Masked(), (torch.zeros(2, 4, 4), torch.zeros(2, 4, 4)), nn.functional.mse_loss)
    with pytest.raises(TraceError, match=r"runs in bfloat16(.|\n)*dtype=x.dtype"):
        trace_model(source)


def test_a_number_where_forward_looks_up_a_row_is_told_to_be_an_integer():
    source = module_source(nn.Embedding(4, 4), (torch.zeros(2, 4), torch.zeros(2)), lambda y, _: y.mean())
    with pytest.raises(
        TraceError,
        match=r"found: floating-point numbers where torch.long(.|\n)*write .long\(\) in that line, or return it so",
    ):
        trace_model(source)


def test_an_output_of_a_class_that_torch_does_not_know_says_to_leave_it_out(tmp_path):
    text = "class Cache:\n    pass\n" + model_text("return super().forward(x), Cache()")
    path = write(tmp_path, text + "def loss_fn(outputs, targets):\n    return outputs[0].mean()\n")
    with pytest.raises(TraceError, match=r"Cache(.|\n)*fix: return only what the loss reads; .* use_cache=False"):
        trace_model(model_source(path, {}))


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


@dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    y: torch.Tensor
    scale: float = 2.0


class Summing(nn.Linear):
    def forward(self, pair):
        return Pair(super().forward(pair.x) * pair.scale, pair.y)


@pytest.mark.parametrize("trace", [trace_model, trace_modules])
def test_dataclasses_may_be_inputs_targets_and_outputs_with_arrays_in_their_fields(trace):
    source = ModelSource(
        name="pair",
        where="pair",
        build_model=lambda: Summing(4, 4),
        make_batch=lambda n: (Pair(numpy.zeros((n, 4)), torch.zeros(n, 4)), Pair(torch.zeros(n, 4), numpy.zeros(n))),
        loss_fn=lambda outputs, targets: (outputs.x + outputs.y - targets.x).square().mean(),
    )
    paths = [item.path for item in trace(source).inputs]
    assert paths == [("inputs", "x"), ("inputs", "y"), ("targets", "x"), ("targets", "y")]


@pytest.mark.parametrize("trace", [trace_model, trace_modules])
@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (lambda n: (["text"] * n, torch.zeros(n, 4)), "inputs: found 'a list of text'(.|\n)*tokenizer"),
        (lambda n: ({"input": torch.zeros(n, 4), "of": ("text",) * n}, None), "inputs.of: found 'a tuple of text'"),
        (lambda n: (numpy.array(["text"] * n), None), "inputs: found 'an array of <U4'"),
        (lambda n: (numpy.zeros((n, 4), dtype=numpy.longdouble), None), "inputs: found 'an array of (float|long)"),
        (lambda n: (torch.zeros(n, 4), [1.0] * n), r"targets: found 'a list of numbers(.|\n)*torch.tensor\(\[...\]\)"),
        (lambda n: (torch.zeros(n, 4), {"ids": [[1] * i for i in range(n)]}), "targets.ids: found 'a list of numbers"),
    ],
)
def test_what_a_batch_has_for_each_sample_outside_of_tensors_is_refused(trace, batch, found):
    source = ModelSource(
        name="own",
        where="own.py",
        build_model=lambda: nn.Linear(4, 4),
        make_batch=batch,
        loss_fn=lambda outputs, targets: outputs.square().mean(),
    )
    with pytest.raises(InputError, match=rf"own.py: make_batch\(2\): {found}"):
        trace(source)


@pytest.mark.parametrize("kind", ["uint16", "uint32"])
def test_a_dtype_that_no_operator_of_a_graph_has_is_refused(kind):
    source = ModelSource(
        name="own",
        where="own.py",
        build_model=lambda: nn.Linear(4, 4),
        make_batch=lambda n: (numpy.zeros((n, 4), dtype=kind), torch.zeros(n, 4)),
        loss_fn=nn.functional.mse_loss,
    )
    with pytest.raises(InputError, match=rf"own.py: make_batch\(2\)(.|\n)*torch.{kind}(.|\n)*astype\('int64'\)"):
        trace_model(source)


def test_a_batch_of_other_mappings_than_dicts_is_traced_as_dicts():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    def loss_fn(outputs, targets):
        return (outputs - targets["y"]).square().mean()

    batch = UserDict(x=torch.zeros(2, 4)), UserDict(y=torch.zeros(2, 4))
    source = module_source(Own(4, 4), batch, loss_fn)
    in_file = replace(
        source,
        make_batch=lambda n: tuple(UserDict({key: item[key][:1].expand(n, 4) for key in item}) for item in batch),
    )
    for graph in (
        trace_model(source),
        trace_model(in_file),
        trace_modules(replace(in_file, build_model=lambda: Own(4, 4))),
    ):
        assert [item.path for item in graph.inputs] == [("inputs", "x"), ("targets", "y")]
