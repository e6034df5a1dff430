"""`hf:PATH/config.json`: the model file that stands for a configuration, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed.launch import run_program

from autoplan import api, cli
from autoplan.errors import InputError, TraceError, UsageError
from autoplan.options import Options
from autoplan.runtime.input_pipeline.model_calls import call_model
from autoplan.tracing.hugging_face import model_file_text, write_model_file
from autoplan.tracing.model_source import load_model_file, model_source
from autoplan.tracing.trace import trace_model

DECODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
}
ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LABELS = {"id2label": {str(i): f"label {i}" for i in range(8)}}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
CONFIGS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", **DECODER},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        **{"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1},
    },
    "bert": {"architectures": ["BertForMaskedLM"], "vocab_size": 64, "max_position_embeddings": 16, **ENCODER},
    "t5": {"architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0, **T5},
    "bart": {
        "architectures": ["BartForConditionalGeneration"],
        **{"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 16},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
        **{"dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
    },
    "vit": {"architectures": ["ViTForImageClassification"], "image_size": 16, "patch_size": 4, **ENCODER, **LABELS},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, **DECODER},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **DECODER},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 8, **DECODER},
    "mistral": {"architectures": ["MistralForSequenceClassification"], "num_labels": 3, **DECODER},
}
# shape of the logits of a batch of 3
LOGITS = {
    "llama": (3, 16, 64), "gpt2": (3, 16, 64), "bert": (3, 16, 64), "t5": (3, 8, 64),
    "bart": (3, 16, 64), "vit": (3, 8),
    "mixtral": (3, 16, 64),
    "qwen2": (3, 16, 64), "qwen3": (3, 16, 64), "mistral": (3, 3),
}  # fmt: skip
OVERRIDES = {"t5": {"context": 8}}
LIKE_OTHERS = ("bart", "gpt2", "mixtral", "qwen2", "qwen3")  # to `hf:`, as T5 and Llama are


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(folder: Path, name: str, **changes) -> Path:
    values = {"model_type": name, **CONFIGS.get(name, {}), **changes}
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return path


def constants(text: str) -> dict[str, object]:
    """What the text of a model file assigns to names in capitals."""
    return {
        name: eval(value)
        for name, value in (line.split(" = ", 1) for line in text.splitlines() if " = " in line)
        if name.isupper() and value.isdigit()
    }


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.nightly] * (name in LIKE_OTHERS)) for name in CONFIGS]
)
def test_a_configuration_becomes_a_model_file_that_is_traced_and_learns(tmp_path, model_type):
    path = f"hf:{written(tmp_path, model_type)}"
    overrides = OVERRIDES.get(model_type, {})
    model_file = load_model_file(write_model_file(path, overrides))
    torch.manual_seed(0)
    model, (inputs, targets) = model_file.build_model(), model_file.make_batch(3)
    logits = call_model(model, inputs)
    assert logits.shape == LOGITS[model_type]
    assert all(p.dtype == torch.float32 for p in model.parameters())
    loss = model_file.loss_fn(logits, targets)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert model_file.loss_fn(call_model(model, inputs), targets) < loss

    graph = api.trace_model(path, overrides=overrides)
    assert graph.n_parameters() == sum(p.numel() for p in model.parameters())
    n_blocks = 4 if model_type in ("t5", "bart") else 2
    assert sum(segment.is_block for segment in graph.segments) == n_blocks


@pytest.mark.parametrize("model_type", CONFIGS)
def test_the_text_is_formatted_and_names_no_path(tmp_path, model_type):
    name, text = model_file_text(written(tmp_path, model_type), {})
    assert name == f"{model_type}.py"
    assert str(tmp_path) not in text
    for command in (["format", "--check", "-"], ["check", "--select", "E,F,W,I,UP", "-"]):
        arguments = [sys.executable, "-m", "ruff", command[0], "--line-length", "120", *command[1:]]
        done = subprocess.run(arguments, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_set_changes_fields_under_both_of_their_names(tmp_path):
    path = written(tmp_path, "gpt2")
    for name in ("n_layer", "num_hidden_layers"):
        graph = api.trace_model(f"hf:{path}", overrides={name: 3, "context": 8})
        assert sum(segment.is_block for segment in graph.segments) == 3
        assert graph.inputs[0].spec.at(1) == (1, 8)


def test_lists_with_an_entry_per_layer_follow_the_number_of_layers(tmp_path):
    path = written(tmp_path, "qwen2", layer_types=["full_attention"] * 2)
    for n_layers in (1, 3):
        graph = api.trace_model(f"hf:{path}", overrides={"num_hidden_layers": n_layers})
        assert sum(segment.is_block for segment in graph.segments) == n_layers


def read_config(text: str) -> dict[str, object]:
    """CONFIG of a model file's text."""
    return eval(text.split("CONFIG = ", 1)[1].split("\nVOCABULARY", 1)[0])


def test_what_has_an_entry_per_layer_is_cut_whatever_its_name(tmp_path):
    listed = {"no_rope_layers": [1, 0], "pad_token_id": 1, "eos_token_id": [1, 2]}
    cut = read_config(model_file_text(written(tmp_path, "smollm3", **DECODER, **listed), {"num_hidden_layers": 1})[1])
    assert (cut["no_rope_layers"], cut["eos_token_id"]) == ([1], [1, 2])
    by_number = {"per_layer_config": {"0": {"head_dim": 8}, "1": {"head_dim": 16}}}
    path = written(tmp_path, "gemma4_text", **DECODER, **by_number)
    cut = read_config(model_file_text(path, {"num_hidden_layers": 1})[1])
    assert cut["per_layer_config"] == {"0": {"head_dim": 8}}


def test_a_class_for_text_is_built_from_the_text_part_of_a_configuration(tmp_path):
    path = written(tmp_path, "llama4", architectures=["Llama4ForCausalLM"], text_config={"head_dim": 8, **DECODER})
    name, text = model_file_text(path, {"num_hidden_layers": 1})
    assert name == "llama4.py" and "Llama4TextConfig.from_dict" in text
    assert read_config(text) == {"head_dim": 8, **DECODER, "num_hidden_layers": 1, "use_cache": False}


def test_set_reaches_the_parts_of_a_configuration(tmp_path):
    listed = {"head_dim": 8, **DECODER, "layer_types": ["full_attention"] * 2}
    path = written(tmp_path, "gemma3", architectures=["Gemma3ForConditionalGeneration"], text_config=listed)
    set_to = {"text_config.num_hidden_layers": 1, "vision_config.image_size": 56, "text_config.head_dim": 16}
    found = read_config(model_file_text(path, set_to)[1])
    assert found["text_config"]["num_hidden_layers"] == 1
    assert found["text_config"]["head_dim"] == 16
    assert found["text_config"]["layer_types"] == ["full_attention"]  # cut with the layers
    assert found["vision_config"]["image_size"] == 56  # a part that the file leaves to its class


def test_set_takes_the_name_of_the_part_also_where_the_model_is_that_part(tmp_path):
    path = written(tmp_path, "llama4", architectures=["Llama4ForCausalLM"], text_config={"head_dim": 8, **DECODER})
    named = model_file_text(path, {"text_config.num_hidden_layers": 1})
    assert named == model_file_text(path, {"num_hidden_layers": 1})


@pytest.mark.parametrize("name", ["text_config.num_hiden_layers", "txt_config.num_hidden_layers"])
def test_a_wrong_name_of_a_part_is_answered_with_the_right_one(tmp_path, name):
    path = written(tmp_path, "gemma3", architectures=["Gemma3ForConditionalGeneration"], text_config=dict(DECODER))
    nearest = "num_hidden_layers" if name.startswith("text") else "text_config.NAME"
    with pytest.raises(UsageError, match=rf"(?s)--set {name}: .*did you mean \"{nearest}\""):
        model_file_text(path, {name: 1})


def test_images_have_the_size_that_the_part_for_them_names(tmp_path):
    architectures = ["SiglipForImageClassification"]
    path = written(tmp_path, "siglip", architectures=architectures, vision_config={"image_size": 48, "num_channels": 1})
    found = constants(model_file_text(path, {})[1])
    assert (found["N_CHANNELS"], found["HEIGHT"], found["WIDTH"]) == (1, 48, 48)


def test_no_part_of_a_configuration_keeps_a_cache(tmp_path):
    architectures = ["Gemma3ForConditionalGeneration"]
    path = written(tmp_path, "gemma3", architectures=architectures, text_config={"head_dim": 8, **DECODER})
    assert read_config(model_file_text(path, {})[1])["text_config"]["use_cache"] is False


def test_numbers_that_are_not_finite_are_written_as_python(tmp_path):
    _, text = model_file_text(written(tmp_path, "qwen2", initializer_range=float("inf")), {})
    assert '"initializer_range": float("inf"),' in text


def test_num_labels_replaces_the_labels_of_the_file(tmp_path):
    _, text = model_file_text(written(tmp_path, "vit"), {"num_labels": 5})
    assert constants(text)["N_LABELS"] == 5


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [(16, 16), (514, 512), (131072, 2048)],  # two positions that a model keeps for itself; more than is trained
)
def test_the_default_context_is_what_the_model_allows_up_to_a_limit(tmp_path, allowed, expected):
    _, text = model_file_text(written(tmp_path, "llama", max_position_embeddings=allowed), {})
    assert constants(text)["CONTEXT"] == expected


def test_without_architectures_it_is_the_causal_language_model(tmp_path):
    _, text = model_file_text(written(tmp_path, "llama", architectures=None), {})
    assert "LlamaForCausalLM(LlamaConfig." in text


def test_a_folder_stands_for_the_configuration_in_it(tmp_path):
    written(tmp_path, "llama")
    assert write_model_file(f"hf:{tmp_path}", {}) == write_model_file(f"hf:{tmp_path}/config.json", {})


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({"model_type": "lama"}, {}, "model_type: found 'lama'.*did you mean \"llama\""),
        ({"model_type": None}, {}, 'model_type: .*expected.*add "model_type"'),
        ({"architectures": ["LlamaModel"]}, {}, r"architectures: found \['LlamaModel'\].*LlamaForCausalLM"),
        ({"quantization_config": {"bits": 4}}, {}, "quantization_config: "),
        ({"hidden_size": "wide"}, {}, "hidden_size.*expected int.*fix"),
        ({}, {"hiden_size": 64}, '--set hiden_size: .*did you mean "hidden_size"'),
        ({}, {"num_attention_heads": "many"}, "num_attention_heads.*expected int"),
        ({}, {"num_attention_heads": 5}, "not a multiple of the number of attention heads"),
        ({}, {"context": 17}, "--set context: found 17.*at most max_position_embeddings = 16"),
        ({}, {"context": "long"}, "--set context: found 'long'"),
        ({"vocab_size": 0}, {}, "vocab_size: found 0"),
    ],
)
def test_a_configuration_that_cannot_be_used_names_the_field(tmp_path, changes, overrides, message):
    path = written(tmp_path, "llama", **changes)
    with pytest.raises(InputError, match=rf"(?s){path}.*{message}"):
        model_file_text(path, overrides)


@pytest.mark.parametrize("overrides", [{"context": 8}, {"num_labels": 1}])
def test_a_classifier_of_images_needs_labels_and_no_context(tmp_path, overrides):
    with pytest.raises(InputError, match=next(iter(overrides))):
        model_file_text(written(tmp_path, "vit"), overrides)


def test_what_fails_inside_the_library_is_named_with_its_file_and_line(tmp_path):
    # there is no such set of hidden states, which transformers finds out in forward
    path = write_model_file(f"hf:{written(tmp_path, 'llama')}", {"output_hidden_states": "true"})
    with pytest.raises(TraceError, match=r"cannot trace the model at .*transformers.*\.py:\d+: "):
        trace_model(model_source(path, {}))


def test_code_beside_a_configuration_never_runs(tmp_path):
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('it ran')")
    path = written(tmp_path, "own", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    with pytest.raises(InputError, match="is never run"):
        model_file_text(path, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "config.json: no such file\n"), ("{", "no JSON"), ("[]", "model_type: found 'list'"), ("\xff", "no JSON")],
)
def test_a_file_that_is_no_configuration_exits_with_3(tmp_path, capsys, text, message):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    assert cli.run(["plan", f"hf:{path}", "--hw", "dgx_a100_x8"]) == 3
    error = capsys.readouterr().err
    assert message in error and "fix:" in error


def test_without_transformers_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="pip install"):
        model_file_text(written(tmp_path, "llama"), {})


def test_an_emitted_folder_holds_the_model_and_trains_like_one_process(tmp_path):
    path = f"hf:{written(tmp_path, 'qwen3')}"
    options = Options(global_batch=4, fix=(("dp", "2"), ("tp", "1"), ("pp", "1"), ("zero", "3")))
    problem = api.make_problem(path, hw="dgx_a100_x8", overrides={"num_hidden_layers": 1}, options=options)
    api.emit(problem, api.solve(problem), tmp_path / "out")
    text = (tmp_path / "out" / "model.py").read_text()
    assert '"num_hidden_layers": 1,' in text and "autoplan" not in text
    run_program(tmp_path / "out", 2, "--steps", "2", "--device", "cpu", "--dtype", "float64", "--check")
