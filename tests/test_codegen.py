"""The generated program as text: golden, laid out as formatters do it, free of lint, in the words of the user."""

from dataclasses import replace
from pathlib import Path

import pytest
from distributed.families import FAMILIES
from distributed.lint import assert_formatted_and_free_of_lint, run_ruff
from distributed.programs import MODELS, graph_of, make_plan
from test_families import LIKE_OTHERS
from test_families import MODELS as IN_TEST_FAMILIES

from autoplan.codegen import config_values
from autoplan.codegen.layout_text import statement
from autoplan.codegen.lines import Line, Wish, function_lines
from autoplan.codegen.parallel_model import parallel_model_text
from autoplan.rules import load_rules

GOLDEN = Path(__file__).parent / "golden" / "programs"
PLANS = {
    "gpt_tp2_pp2": ("gpt", {"tp": 2, "pp": 2, "sharding": "R", "n_micro_batches": 2}),
    "llama_tp2_sequence": ("llama", {"tp": 2, "sharding": "S(1)"}),
    "mlp_pp2_interleaved": ("mlp", {"pp": 2, "schedule": "interleaved", "n_chunks": 2, "n_micro_batches": 2}),
}
MESHES = ({"pp": 2, "n_micro_batches": 2}, {"tp": 2, "sharding": "R"})


MODELS["gpt_dropout"] = ("gpt.py", {"n_layers": 2, "n_heads": 4, "width": 32, "context": 16, "dropout": 0.1})


def generated(model, **mesh):
    return parallel_model_text(graph_of(model), make_plan(model, **mesh), rules=load_rules())


def text_of(name):
    model, mesh = PLANS[name]
    return generated(model, **mesh)


@pytest.mark.parametrize("name", PLANS)
def test_generated_model_is_the_golden_one(name):
    path = GOLDEN / f"{name}.py"
    text = text_of(name)
    if not path.exists():  # pragma: no cover - to renew a golden file, delete it and run the test twice
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        pytest.fail(f"{path} was written; look at it and run again")
    assert text == path.read_text()


LONG = ("conformer", "fourier", "mistral_hf", "mixtral_hf", "qwen_hf")


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name in LONG))
        for name in (*sorted(set(FAMILIES.values()) - set(IN_TEST_FAMILIES)), *LIKE_OTHERS)
    ],
)
def test_generated_models_are_formatted_and_have_no_unused_import_and_no_undefined_name(model, tmp_path):
    for number, mesh in enumerate(MESHES):
        (tmp_path / f"parallel_{number}.py").write_text(generated(model, **mesh))
    assert_formatted_and_free_of_lint(tmp_path)


def test_a_block_is_one_class_however_often_it_repeats():
    text = text_of("gpt_tp2_pp2")
    assert text.count("class Block(nn.Module):") == 1
    assert "for block in self.blocks.values():" in text
    assert "aten" not in text


def test_every_collective_says_why_it_is_there_and_what_it_moves():
    lines = text_of("gpt_tp2_pp2").splitlines()
    calls = [n for n, line in enumerate(lines) if any(f" = {name}(" in line for name in ("all_gather", "copy_to_tp"))]
    assert calls
    for number in calls:
        assert lines[number - 1].strip().startswith("# all-") and "bytes" in lines[number - 1]
    assert "# reduce-scatter of the partial sums of down, all-gather of its gradient: 4,096 bytes" in "\n".join(lines)


def test_values_are_called_as_in_the_users_source():
    text = text_of("llama_tp2_sequence")
    assert "def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:" in text
    assert "q = q * cos + torch.cat((-q_2, q_1), -1) * sin" in text


def test_a_stage_takes_what_the_users_forward_calls_its_inputs():
    text = generated("t5_hf", pp=2, n_micro_batches=2)
    assert "def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor)" in text


def test_containers_of_equal_numbers_below_one_module_do_not_replace_each_other():
    text = generated("shared_layers", tp=2, sharding="R")
    stage = text[text.index("class Stage0") :]
    assert stage.count("self.parts = ") == 1
    assert stage.count("layers = nn.ModuleDict(") == 2


def test_a_weight_that_several_stages_use_is_tied():
    # the second layer of the decoder is called last in one stage and last in the next
    text = generated("shared_layers", pp=4, n_micro_batches=4)
    assert '("parts.decoder.layers.1.up.weight",)' in text[text.index("TIED") :]


def test_a_module_with_weights_is_created_before_its_children():
    text = generated("bert_hf", pp=2, n_micro_batches=2)
    stage = text[text.index("class Stage1") :]
    assert stage.index("self.cls.predictions = Weights(bias=(64,))") < stage.index("self.cls.predictions.transform")


def test_shards_drop_elements_of_their_own_and_whole_values_the_same():
    split = generated("gpt_dropout", tp=2, sharding="S(1)")
    assert "rank_dropout(" in split and ", 0.1, self.training, self.tp)" in split
    assert "rank_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True, tp=self.tp)" in split
    whole = generated("gpt_dropout", pp=2, n_micro_batches=2)
    assert "rank_dropout" not in whole and "rank_attention" not in whole
    assert "F.dropout(" in whole


def test_a_buffer_that_is_written_in_parts_is_put_together_again():
    lines = [line.strip() for line in generated("resnet", tp=2, sharding="R").splitlines()]
    at = lines.index("self.bn1.running_mean.copy_(all_gather(bn1_running_mean, 0, self.tp))")
    assert lines[at - 1].startswith("# all-gather of the parts of bn1.running_mean, which are written: ")
    assert any(line.startswith("bn1_running_mean = shard(self.bn1.running_mean, 0,") for line in lines[:at])
    classes = "\n".join(lines).split("\nclass ")
    assert max(text.count("self.bn1.running_mean.copy_(") for text in classes) == 1


def lines_of(lines, results=("y",), **arguments):
    names = {(name, ""): name for name in arguments or {"x": ""}}
    results = [(name, "") for name in results]
    return function_lines(lines, known={}, arguments=names, dtypes={}, batch="", results=results, indent=2)


def line(template, reads, makes, *, name=None, **fields):
    wish = Wish((name or makes,), may_rebind=name is not None)
    reads = tuple((read, "") for read in reads)
    return Line(template, reads, ((makes, ""),) if makes else (), (wish,) if makes else (), **fields)


def test_a_name_is_taken_over_only_when_nothing_reads_its_old_value():
    dead = [line("f(_0_)", "x", "a", name="x"), line("g(_0_)", "a", "y")]
    alive = [line("f(_0_)", "x", "a", name="x"), line("g(_0_, _1_)", ("a", "x"), "y")]
    assert lines_of(dead) == ["x = f(x)", "y = g(x)", "return y"]
    assert lines_of(alive) == ["x_2 = f(x)", "y = g(x_2, x)", "return y"]


def test_an_expression_without_a_name_is_written_where_it_is_read_in_the_fewest_parentheses():
    lines = [line("_0_ + 1", "x", "a", nests="any"), line("_0_ * 2", "a", "b", nests="any"), line("-_0_", "b", "y")]
    assert lines_of(lines) == ["y = -((x + 1) * 2)", "return y"]


def test_an_expression_is_not_moved_over_a_write():
    write = line("_0_.add_(1)", "x", "", has_effect=True)
    lines = [line("_0_ + 1", "x", "a", nests="any"), write, line("f(_0_)", "a", "y")]
    assert lines_of(lines) == ["a = x + 1", "x.add_(1)", "y = f(a)", "return y"]


def test_a_line_that_nothing_reads_is_left_out_unless_it_has_an_effect():
    lines = [line("f(_0_)", "x", "unread"), line("g(_0_)", "x", "", has_effect=True), line("h(_0_)", "x", "y")]
    assert lines_of(lines) == ["g(x)", "y = h(x)", "return y"]


def test_a_loop_carries_its_first_value_and_keeps_what_it_reads_each_time():
    loop = line("block(_0_, _1_)", ("x", "mask"), "y", name="mask", loop="for block in self.blocks")
    assert lines_of([loop], x="", mask="") == ["for block in self.blocks:", "    x = block(x, mask)", "return x"]


@pytest.mark.parametrize(
    "text",
    [
        "value = torch.cat((" + ", ".join(f"operand_{i}" for i in range(14)) + "), dim=1)",
        "value = function(" + ", ".join(f"operand_{i}" for i in range(10)) + ")",
        "value = function(" + ", ".join(f"operand_{i}" for i in range(20)) + ")",
        "table: tuple[str, ...] = (" + ", ".join(f'"operand_{i}"' for i in range(20)) + ")",
        "self.blocks = nn.ModuleDict({" + ", ".join(f'"{i}": Block{i}(tp)' for i in range(12)) + "})",
    ],
)
def test_a_long_statement_is_broken_as_the_formatter_breaks_it(text, tmp_path):
    path = tmp_path / "long.py"
    path.write_text("\n".join(statement(text)) + "\n")
    assert len(statement(text)) > 1
    done = run_ruff("format", "--isolated", "--line-length", "120", "--diff", str(path))
    assert done.returncode == 0, done.stdout


def test_a_cast_that_float64_needs_is_there_in_all_precisions_as_all_are_checked_in_it():
    plan = make_plan("mixed_dtypes", tp=2, sharding="R")
    texts = [
        parallel_model_text(graph_of("mixed_dtypes"), replace(plan, precision=precision), rules=load_rules())
        for precision in ("fp32", "fp64")
    ]
    assert all("weights.to(torch.float32)" in text for text in texts)


def test_config_names_the_recomputed_modules_and_the_blocks():
    plan = make_plan("gpt", recompute="half")
    values = config_values(graph_of("gpt"), plan)
    assert values["recompute"] == ("blocks.0", "blocks.2")
    assert values["blocks"] == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
