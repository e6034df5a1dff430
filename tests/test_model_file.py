"""Model files: what is wrong with one is said with its line, and what a command line gave it is told apart."""

import pytest
import torch
from model_texts import LOSS, MAKE_BATCH, model_text, trace_example, write
from torch import nn

from autoplan.errors import InputError, TraceError, UsageError
from autoplan.tracing.model_source import ModelSource, load_model_file, model_source
from autoplan.tracing.module_level import trace_modules
from autoplan.tracing.trace import trace_model


def test_a_model_file_without_build_model_names_what_it_has(tmp_path):
    path = write(tmp_path, "def create():\n    pass\n")
    with pytest.raises(InputError, match=r"build_model: found 'functions: create'"):
        load_model_file(path)


def test_an_error_while_importing_names_file_and_line(tmp_path):
    path = write(tmp_path, "\nraise RuntimeError('no such thing')\n")
    with pytest.raises(InputError, match=r"RuntimeError: no such thing \(line 4\)"):
        load_model_file(path)


SCRIPTS = [  # what a file without a guard may do when it is imported
    "\nsys.exit(0)\n",
    "import argparse\nargparse.ArgumentParser().parse_args(['--data'])\n",
]


@pytest.mark.parametrize("text", SCRIPTS)
def test_a_model_file_that_ends_python_is_an_input_error_that_names_the_line(tmp_path, text):
    path = write(tmp_path, "import sys\n" + text)
    with pytest.raises(InputError, match=r"sys\.exit\([02]\) \(line 5\)\n  expected: (.|\n)*fix: .*__main__"):
        load_model_file(path)


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("return Model", InputError, r"build_model\(\) failed: sys\.exit\('no weights'\) \(line \d+\)(.|\n)*fix: "),
        ("return torch.zeros", InputError, r"make_batch failed(.|\n)*sys\.exit\('no weights'\) at .*model\.py:\d+"),
        ("return super", TraceError, r"model\.py:\d+(.|\n)*found: sys\.exit\('no weights'\)(.|\n)*fix: "),
        ("return (outputs", TraceError, r"model\.py:\d+(.|\n)*found: sys\.exit\('no weights'\)(.|\n)*fix: "),
    ],
)
@pytest.mark.parametrize("trace", [trace_model, trace_modules])
def test_functions_of_a_model_file_that_end_python_are_errors(tmp_path, line, error, message, trace):
    text = (model_text("return super().forward(x)") + LOSS).replace(line, f"exit('no weights'); {line}")
    with pytest.raises(error, match=message):
        trace(model_source(write(tmp_path, text), {}))


def test_an_interrupt_in_a_model_file_is_none_of_its_errors(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        load_model_file(write(tmp_path, "raise KeyboardInterrupt\n"))


def test_a_syntax_error_names_its_line_once_with_a_fix(tmp_path):
    path = write(tmp_path, "\ndef build_model(:\n")
    with pytest.raises(InputError, match=r"SyntaxError: invalid syntax \(model\.py, line 4\)\n  expected: .*\n  fix: "):
        load_model_file(path)


@pytest.mark.parametrize(
    ("function", "found", "expected"),
    [
        (
            "def build_scheduler(optimizer):\n    pass\n",
            "build_scheduler(optimizer)",
            "build_scheduler(optimizer, n_steps)",
        ),
        ("def build_optimizer():\n    pass\n", "build_optimizer()", "build_optimizer(params)"),
        ("build_optimizer = 3\n", "build_optimizer = 3", "build_optimizer(params)"),
    ],
)
def test_a_function_that_the_program_cannot_call_is_refused_before_it_is_planned(tmp_path, function, found, expected):
    path = write(tmp_path, "def build_model():\n    return nn.Linear(4, 4)\n" + MAKE_BATCH + LOSS + function)
    with pytest.raises(InputError) as raised:
        load_model_file(path)
    assert f"found '{found}'" in str(raised.value) and f"expected: {expected}\n" in str(raised.value)


def test_an_unknown_override_is_a_wrong_command_line_and_shows_the_signature():
    with pytest.raises(UsageError, match=r"build_model\(width: int = 256"):
        trace_example("mlp.py", breadth=4)


def test_an_argument_that_the_model_file_itself_gets_wrong_is_not_taken_for_a_set_value(tmp_path):
    text = "def build_model(width=4):\n    return nn.Linear(width, width, breadth=3)\n" + MAKE_BATCH + LOSS
    for overrides in ({}, {"width": 8}):
        with pytest.raises(InputError, match=r"failed: TypeError: .*'breadth' \(line 4\)\n") as raised:
            trace_model(model_source(write(tmp_path, text), overrides))
        assert not isinstance(raised.value, UsageError)


def test_a_value_that_build_model_cannot_use_shows_the_signature_too():
    with pytest.raises(InputError, match=r"build_model\(width='wide'\) failed: TypeError(.|\n)*expected: (.|\n)*fix: "):
        trace_example("mlp.py", width="wide")


def test_a_make_batch_that_takes_no_batch_size_is_not_blamed_on_a_file_of_ours(tmp_path):
    model = "def build_model():\n    return nn.Linear(4, 4)\n"
    path = write(tmp_path, model + MAKE_BATCH.replace("make_batch(n)", "make_batch()") + LOSS)
    with pytest.raises(InputError, match=r"expected: make_batch\(batch_size\) -> \(inputs, targets\)") as raised:
        trace_model(model_source(path, {}))
    assert "user_errors.py" not in str(raised.value) and "--set" not in str(raised.value)


def test_values_are_only_blamed_where_some_were_given(tmp_path):
    model = "def build_model(width=4):\n    return nn.Linear(width, width)\n"
    path = write(tmp_path, model + "def make_batch(n):\n    raise RuntimeError('no')\n" + LOSS)
    for overrides, fix in (({}, "correct it$"), ({"width": 8}, "correct it, or the --set values it works with$")):
        with pytest.raises(InputError, match=f"make_batch failed(.|\n)*fix: {fix}"):
            trace_model(model_source(path, overrides))
    broken = write(tmp_path, "def build_model():\n    raise RuntimeError('no')\n" + MAKE_BATCH + LOSS)
    with pytest.raises(InputError, match=r"build_model\(\) failed(.|\n)*without arguments\n  fix: correct it$"):
        trace_model(model_source(broken, {}))


def test_a_package_that_a_model_file_lacks_is_named_with_how_to_get_it(tmp_path):
    fix = "fix: install the package that provides no_such_package, or put its file beside the model file"
    with pytest.raises(InputError, match=fix):
        load_model_file(write(tmp_path, "import no_such_package\n"))


@pytest.mark.parametrize("trace", [trace_model, trace_modules])
def test_a_batch_may_depend_on_what_build_model_has_set(trace):
    sizes = []

    def build_model():
        sizes.append(4)
        return nn.Linear(4, 4)

    source = ModelSource(
        name="own",
        where="own.py",
        build_model=build_model,
        make_batch=lambda n: (torch.zeros(n, sizes[0]), torch.zeros(n, 4)),
        loss_fn=nn.functional.mse_loss,
    )
    assert trace(source).ops
