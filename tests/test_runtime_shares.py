"""Data-parallel ranks that take different shares of a batch: their samples, and training like one process."""

from types import SimpleNamespace

import pytest
import torch
from distributed import tiny_gpt
from distributed.launch import run_ranks
from distributed.tiny_parallel import parallel_model
from torch.nn import functional as F
from torch.utils.data import Dataset

from autoplan.runtime import Config, ParallelModel, PlainTraining, build_rank_mesh, compare, global_batch, local_batch
from autoplan.runtime.input_pipeline.batches import batch_slice, micro_batches
from autoplan.runtime.input_pipeline.loading import training_data

IGNORED = -100
N_STEPS = 2
BLOCKS = tuple(f"blocks.{layer}" for layer in range(tiny_gpt.N_LAYERS))
# Ranks, samples of a micro-batch, micro-batches: 2 x (2 x 3) + 2 x (3 x 1) = 18 samples
SHARES = ((2, 2, 3), (2, 3, 1))
CASES = {
    "ZeRO 0": Config(dp=4, shares=SHARES),
    "ZeRO 0, one rank of one kind": Config(dp=4, shares=((3, 1, 2), (1, 4, 3))),
    **{f"ZeRO {stage}": Config(dp=4, shares=SHARES, zero_stage=stage, zero_shard_degree=2) for stage in (1, 2, 3)},
    **{
        f"ZeRO {stage}, one share recomputes": Config(
            dp=4, shares=SHARES, zero_stage=stage, zero_shard_degree=2, share_recompute=((), BLOCKS)
        )
        for stage in (1, 3)
    },
    "tensor parallel": Config(dp=2, tp=2, shares=((1, 2, 3), (1, 2, 1))),
    "mean over all targets": Config(dp=4, shares=SHARES, zero_stage=1, zero_shard_degree=2, ignored_target=IGNORED),
    "one kind": Config(dp=4, shares=((2, 2, 2), (2, 2, 2))),
}
# Their stages are among the others, and what they do with shares is that of the stage below or above.


def filled_in(config):
    """A program's config: with the micro-batches of the first share, in float64."""
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    _, size, count = config.shares[0]
    return Config(
        **{**fields, "micro_batch_size": size, "n_micro_batches": count, "precision": "fp64", "blocks": BLOCKS}
    )


def uneven_targets(batch_size):
    """Sample i keeps i % 5 of its targets: the first one of a step has none."""
    inputs, targets = tiny_gpt.make_batch(batch_size)
    targets = targets.clone()
    for sample in range(batch_size):
        targets[sample, sample % 5 :] = IGNORED
    return inputs, targets


def model_file_of(config):
    make_batch = tiny_gpt.make_batch if config.ignored_target is None else uneven_targets
    return SimpleNamespace(build_model=tiny_gpt.build_model, make_batch=make_batch, loss_fn=loss_fn)


def loss_fn(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def train(config):
    """Differences of each step from one pass of one process over the whole batch, and of the evaluated loss."""
    model_file, mesh = model_file_of(config), build_rank_mesh(config, "cpu")
    generated = parallel_model(config.tp, 1) if config.tp > 1 else None
    options = {"seed": 7, "learning_rate": 1e-2, "max_grad_norm": 0.5}
    model = ParallelModel(config, model_file, generated, mesh=mesh, **options)
    whole = Config(precision="fp64", micro_batch_size=config.global_batch_size)
    plain = PlainTraining(whole, model_file, build_device=model.full_build_device, device=mesh.device, **options)
    found = []
    for step in range(N_STEPS):
        batch = global_batch(model_file.make_batch, batch_size=config.global_batch_size, seed=3, step=step)
        own = local_batch(batch, config=config, dp_rank=mesh.dp_rank)
        evaluated, weight = model.evaluate(own)
        found.append(abs(evaluated.item() - plain.evaluate(batch)))
        loss = model.step(own).item()
        differences = compare(model, plain, loss=loss, plain_loss=plain.step(batch))
        found += [differences.loss, differences.gradient, differences.parameter]
        assert weight > 0
    return found


def train_all():
    return {name: train(filled_in(config)) for name, config in CASES.items()}


@pytest.mark.nightly
def test_unequal_shares_train_like_one_process_over_the_whole_batch():
    for found in run_ranks(train_all, 4, timeout_s=200.0):
        assert list(found) == list(CASES)
        for name, differences in found.items():
            assert max(differences) <= 1e-9, (name, differences)


def test_ranks_have_the_samples_of_their_shares_in_order():
    config = Config(dp=4, micro_batch_size=2, n_micro_batches=3, shares=SHARES)
    assert config.global_batch_size == 18
    assert [config.samples_of(rank) for rank in range(4)] == [slice(0, 6), slice(6, 12), slice(12, 15), slice(15, 18)]
    # losses of micro-batches of 2 and of 3 weigh 2/18 and 3/18 each, after a mean over 4 ranks
    assert [config.mean_divisor(rank) for rank in range(4)] == [18 / (4 * 2)] * 2 + [18 / (4 * 3)] * 2
    batch = torch.arange(18), torch.arange(18)
    own = local_batch(batch, config=config, dp_rank=1)
    assert [inputs.tolist() for inputs, _ in micro_batches(own, config, dp_rank=1)] == [[6, 7], [8, 9], [10, 11]]
    own = batch_slice(batch, 15, 18)
    assert [inputs.tolist() for inputs, _ in micro_batches(own, config, dp_rank=3)] == [[15, 16, 17]]
    with pytest.raises(ValueError, match="1 micro-batches x 3 samples = 3"):
        micro_batches(local_batch(batch, config=config, dp_rank=0), config, dp_rank=3)


class Numbers(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index, 0


def test_no_two_ranks_get_the_same_sample_and_a_run_goes_on_where_it_was():
    config = Config(dp=4, micro_batch_size=2, n_micro_batches=3, shares=SHARES)
    model_file = SimpleNamespace(build_dataset=Numbers)

    def data(rank, other=config):
        return training_data(model_file, config=other, dp_rank=rank, device=torch.device("cpu"), seed=0)

    own = [data(rank) for rank in range(4)]
    first, second = ([next(each)[0].tolist() for each in own] for _ in range(2))
    assert [len(samples) for samples in first] == [6, 6, 3, 3]
    seen = [sample for samples in (*first, *second) for sample in samples]
    assert len(set(seen)) == 36 and set(seen) < set(range(40))  # 4 of 40 are left
    # The same position under another plan: one rank with all 18 samples.
    other = data(0, Config(micro_batch_size=18))
    next(other)
    again = data(0, Config(micro_batch_size=18))
    again.load_state_dict(other.state_dict())
    assert next(again)[0].tolist() == [sample for samples in second for sample in samples]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp": 5}, "together dp = 5"),
        ({"dp": 4, "zero_stage": 1, "zero_shard_degree": 4}, "expected a divisor of the ranks of each share"),
        ({"dp": 4, "pp": 2}, "none with pp above 1"),
        ({"dp": 4, "batch_norm": "synchronized"}, "synchronized BatchNorm"),
    ],
)
def test_shares_that_cannot_train_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Config(shares=SHARES, **fields)
