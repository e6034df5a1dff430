"""Losses and targets: what is traced, and what is refused when it is planned."""

import re

import pytest
import torch
from model_texts import LINEAR, MAKE_BATCH, write
from torch import nn

from autoplan.errors import InputError, TraceError
from autoplan.tracing.model_source import model_source, module_source
from autoplan.tracing.module_level import trace_modules
from autoplan.tracing.trace import trace_model

F = nn.functional
BCE, NLL = F.binary_cross_entropy_with_logits, F.nll_loss


def test_a_loss_that_is_no_scalar_is_refused(tmp_path):
    path = write(
        tmp_path,
        "def build_model():\n    return nn.Linear(4, 4)\n" + MAKE_BATCH + "def loss_fn(o, t):\n    return o - t\n",
    )
    with pytest.raises(InputError, match="a floating-point scalar"):
        trace_model(model_source(path, {}))


@pytest.mark.parametrize("trace", [trace_model, trace_modules])
@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ("{'loss': (o - t).mean(), 'error': 0}", "a dict of loss, error.*\n.*\n  fix: return the loss alone"),
        ("(o - t).mean(), 0.5", "a tuple of 2.*\n.*\n  fix: return the loss alone"),
        ("None", "found 'None'.*\n.*\n  fix: end loss_fn by `return loss`"),
        ("(o - t).mean().item()", r"a number, .*\n.*\n  fix: return the tensor itself, without \.item\(\)"),
        ("(o.detach() - t).mean()", r"a tensor without a gradient.*\n.*\n  fix: leave out \.detach\(\)"),
    ],
)
def test_a_loss_that_is_no_tensor_or_has_no_gradient_is_refused_with_what_to_return(tmp_path, trace, returned, found):
    model = "def build_model():\n    return nn.Linear(4, 4)\n"
    path = write(tmp_path, model + MAKE_BATCH + f"def loss_fn(o, t):\n    return {returned}\n")
    with pytest.raises(InputError, match=f"model.py: loss: .*{found}"):
        trace(model_source(path, {}))


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


def test_a_loss_that_holds_a_tensor_on_another_device_is_told_where_to_make_it():
    loss_fn = nn.CrossEntropyLoss(weight=torch.ones(4))
    source = module_source(nn.Linear(4, 4), (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)), loss_fn)
    with pytest.raises(TraceError, match=r"loss_fn fails(.|\n)*device=outputs.device"):
        trace_model(source)


def test_a_loss_that_has_no_bfloat16_is_told_to_cast_to_float32():
    def loss_fn(outputs, targets):
        return torch.fft.rfft(outputs).abs().mean()

    source = module_source(nn.Linear(4, 4), (torch.zeros(2, 4), torch.zeros(2, 4)), loss_fn)
    with pytest.raises(TraceError, match=r"loss_fn fails(.|\n)*runs in bfloat16(.|\n)*outputs.float\(\)"):
        trace_model(source)


@pytest.mark.parametrize(
    ("loss_fn", "targets", "found"),
    [
        (F.cross_entropy, torch.zeros(2), "floating-point numbers where torch.long(.|\n)*torch.long(.|\n)*F.mse_loss"),
        (NLL, torch.zeros(2, dtype=torch.uint8), "uint8 where torch.long is needed"),
        (BCE, torch.zeros(2, 4, dtype=torch.int64), "int64 where floating(.|\n)*fix: return targets as floats"),
        (BCE, torch.zeros(2, 4, dtype=torch.bool), "bool where floating-point numbers are needed"),
        (F.cross_entropy, torch.zeros(2, 4, dtype=torch.int64), "another dtype where floating(.|\n)*F.cross_entropy"),
        (F.kl_div, torch.zeros(2, 4, dtype=torch.int64), "another dtype where floating-point numbers are needed"),
    ],
)
def test_targets_of_a_dtype_that_the_loss_does_not_take_are_told_which_it_takes(loss_fn, targets, found):
    source = module_source(nn.Linear(4, 4), (torch.zeros(2, 4), targets), lambda y, t: loss_fn(y, t))
    with pytest.raises(TraceError, match=rf"loss_fn fails at {__file__}:\d+: .*loss_fn\(y, t\).*\n  found: {found}"):
        trace_model(source)


@pytest.mark.parametrize(
    ("loss_fn", "targets", "found"),
    [
        (F.cross_entropy, torch.zeros(2, dtype=torch.int32), "'torch.int32'\n  expected: classes, (.|\n)*write .long"),
        (NLL, torch.zeros(2, dtype=torch.int32), "'torch.int32'"),
        (
            lambda y, t: F.binary_cross_entropy(y.sigmoid(), t),
            torch.zeros(2, 4, dtype=torch.int64),
            "'torch.int64'\n  expected: floating-point numbers\n(.|\n)*write .float",
        ),
        (lambda y, t: (y - F.one_hot(t, 4)).sum(), torch.zeros(2), "'floating-point numbers'"),
    ],
)
def test_targets_that_torch_would_refuse_when_the_program_runs_are_refused_when_it_is_planned(loss_fn, targets, found):
    source = module_source(nn.Linear(4, 4), (torch.zeros(2, 4), targets), lambda y, t: loss_fn(y, t))
    with pytest.raises(InputError, match=rf"Linear: targets of \w+( at {__file__}:.*)?: found {found}"):
        trace_model(source)


@pytest.mark.parametrize("targets", [torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4)])
def test_classes_and_shares_of_classes_are_targets_of_a_cross_entropy(targets):
    assert trace_model(module_source(nn.Linear(4, 4), (torch.zeros(2, 4), targets), F.cross_entropy)).ops


@pytest.mark.parametrize(
    "line",
    [
        "loss = loss / float(loss.detach())",
        "loss = loss * 0.5 if loss.item() > 100 else loss",
        "loss = loss * 0.5 if loss > 100 else loss",
        "print(f'{loss:.3f}')",
        "print(loss.detach().numpy())",
    ],
)
def test_a_number_that_a_loss_reads_is_named_with_its_line_and_what_to_write_in_its_place(tmp_path, line):
    loss_fn = (
        f"def loss_fn(outputs, targets):\n    loss = (outputs - targets).square().mean()\n    {line}\n    return loss\n"
    )
    message = rf"loss_fn fails at .*model.py:9: {re.escape(line)}\n  found: a Python number(.|\n)*leave out .item\(\)"
    with pytest.raises(TraceError, match=message):
        trace_model(model_source(write(tmp_path, LINEAR + MAKE_BATCH + loss_fn), {}))


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


def test_a_loss_of_distributions_is_traced_though_they_look_at_values_when_they_run(monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch's default, whoever changed it

    def negative_log_likelihood(outputs, targets):
        return -torch.distributions.Normal(outputs, 1.0).log_prob(targets).mean()

    batch = torch.zeros(2, 4), torch.zeros(2, 4)
    graph = trace_model(module_source(nn.Linear(4, 4), batch, negative_log_likelihood))
    assert graph.specs()[graph.loss].shape == ()
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(torch.zeros(1), -torch.ones(1))


def test_a_loss_whose_shape_depends_on_values_names_the_ways_out():
    with pytest.raises(TraceError, match="DynamicOutputShape") as error:
        trace_model(_ctc(lambda targets: ([8] * len(targets), [3] * len(targets))))
    assert "--module-level" in str(error.value)
