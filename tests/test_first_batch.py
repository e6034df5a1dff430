"""The first batch of a dataset is checked before a step: what the model cannot take is refused, other lengths not."""

import random
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoplan.runtime.config import Config
from autoplan.runtime.input_pipeline.loading import evaluation_data, training_data
from autoplan.runtime.input_pipeline.rehearsal import Rehearsal
from autoplan.runtime.refusal import DataError

CPU = torch.device("cpu")
CONFIG = Config(dp=2, micro_batch_size=2)  # 4 samples a step, 2 of each rank


class Words(nn.Module):
    """Ids [batch, seq] -> logits [batch, 3], for any seq."""

    def __init__(self, width):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, width), nn.Linear(width, 3)

    def forward(self, ids, weights):
        return self.head((self.embedding(ids) * weights[..., None]).mean(dim=1))


def make_batch(n):
    return {"ids": torch.randint(8, (n, 5)), "weights": torch.rand(n, 5)}, torch.randint(3, (n,))


def _model_file(sample, **parts):
    files = {"make_batch": make_batch, "loss_fn": F.cross_entropy, "build_model": Words}
    sets = {name: lambda: [sample] * 8 for name in ("build_dataset", "build_eval_dataset")}
    return SimpleNamespace(**{**files, **sets, **parts})


def _rehearsal(model_file, **options):
    return Rehearsal(model_file, partial(model_file.build_model, 4), **{"is_generated": False, **options})


def _read_both(model_file, **options):
    """Read the first batches of training and of evaluation."""
    reading = {"config": CONFIG, "dp_rank": 1, "device": CPU, "rehearsal": _rehearsal(model_file, **options)}
    next(training_data(model_file, seed=0, **reading))
    evaluation_data(model_file, **reading)


def _sample(n=5, dtype=torch.int64, target=1):
    return {"ids": torch.zeros(n, dtype=dtype), "weights": numpy.ones(n)}, target


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            _sample(dtype=torch.float32),
            "inputs.ids: found floating-point numbers of shape [5] per sample, planned int64",
        ),
        (_sample(target=1.0), "targets: found floating-point numbers of shape [] per sample, planned int64"),
        (_sample(target=[1]), "targets: found targets.0, planned int64"),
        (_sample(target=torch.tensor([1, 2])), "targets: found int64 of shape [2] per sample, planned int64"),
        (_sample(target="a class"), "targets: found text, planned int64"),
        ((torch.zeros(5), 1), "inputs.ids: found inputs, planned int64"),
        (({**_sample()[0], "mask": 1}, 1), "inputs.mask: found int64 of shape [] per sample, planned nothing"),
    ],
)
def test_a_first_batch_that_the_model_cannot_take_is_refused_in_training_and_before_it_for_evaluation(sample, message):
    model_file = _model_file(sample)
    reading = {"config": CONFIG, "dp_rank": 1, "device": CPU, "rehearsal": _rehearsal(model_file)}
    data = training_data(model_file, seed=0, **reading)
    refused = {
        "build_dataset": lambda: next(data),
        "build_eval_dataset": lambda: evaluation_data(model_file, **reading),
    }
    for name, read in refused.items():
        with pytest.raises(DataError) as caught:
            read()
        said = caught.value.code.splitlines()
        assert said[0].startswith(f"model.py: {name}: {message}")
        assert said[1].startswith("  with it the model fails: ") and said[2].startswith("  fix: change the dataset")


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        (_sample(), ""),
        (
            _sample(9),
            "inputs.ids: found int64 of shape [9] per sample, planned int64 of shape [5] per sample\n  the model",
        ),
        (_sample(target=numpy.int32(2)), "targets: found int32 of shape [] per sample, planned int64"),
    ],
)
def test_a_first_batch_that_the_model_takes_is_told_of_where_it_is_unlike_those_planned(sample, told, capsys):
    def loss_fn(outputs, targets):
        return F.cross_entropy(outputs, targets.long())

    _read_both(_model_file(sample, loss_fn=loss_fn))
    said = capsys.readouterr().err
    for name in ("build_dataset", "build_eval_dataset"):
        assert f"model.py: {name}: {told}" in said if told else said == ""


def test_a_generated_program_takes_one_tensor_under_any_name_and_no_others_than_planned():
    def plain(n):
        return torch.rand(n, 2), torch.rand(n, 1)

    parts = {"make_batch": plain, "loss_fn": F.mse_loss, "build_model": lambda _: nn.Linear(2, 1)}
    model_file = _model_file(({"x": torch.rand(2)}, torch.rand(1)), **parts)
    _read_both(model_file, is_generated=True)
    with pytest.raises(DataError, match="inputs: found inputs.x, planned floating-point"):
        _read_both(model_file)
    more = _model_file(({"x": torch.rand(2), "y": torch.rand(2)}, torch.rand(1)), **parts)
    with pytest.raises(DataError, match="ValueError: the inputs of a batch: found x, y, planned: one tensor\n"):
        _read_both(more, is_generated=True)


def test_a_model_that_cannot_be_tried_refuses_nothing():
    def look(outputs, targets):
        assert outputs.any(), "zeros, in place of outputs"

    _read_both(_model_file(_sample(9, target=1.0), loss_fn=look))


def test_a_first_batch_of_another_size_than_planned_is_refused_with_both():
    def short(samples):
        return torch.utils.data.default_collate(samples[1:])

    with pytest.raises(DataError, match=r"build_dataset: the batch .* has \[1\] samples .* = 2\n  fix: load that many"):
        _read_both(_model_file(_sample(), collate=short))


@dataclass
class Drawing:
    """Draws from every generator of the host as it is read."""

    n_read: int = 0

    def __iter__(self):
        for _ in range(8):
            self.n_read += 1
            yield _sample(5 + int(random.random() + numpy.random.rand() + torch.rand(())))


def test_the_check_of_evaluation_reads_one_batch_and_changes_no_generator():
    dataset = Drawing()
    model_file = _model_file(None, build_eval_dataset=lambda: dataset, collate=lambda samples: _batch(samples))
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    evaluation_data(model_file, config=CONFIG, dp_rank=0, device=CPU, rehearsal=_rehearsal(model_file))
    assert dataset.n_read == CONFIG.global_batch_size
    assert states == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def _batch(samples):
    ids = torch.zeros(len(samples), 7, dtype=torch.int64)  # padded: unlike planned, so that it is tried
    return {"ids": ids, "weights": torch.ones(len(samples), 7)}, torch.zeros(len(samples), dtype=torch.int64)
