"""Order, parts and position of training data: what every rank gets, with and without workers, and after a restart."""

import math
import multiprocessing
import random
import re
import signal
import subprocess
import time
import traceback
from contextlib import closing
from itertools import islice
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from autoplan.runtime.config import Config
from autoplan.runtime.input_pipeline.batches import local_batch
from autoplan.runtime.input_pipeline.loading import TrainingData, evaluation_data, training_data
from autoplan.runtime.refusal import DataError, DatasetError, OptionError
from autoplan.runtime.train import timed_step

CPU = torch.device("cpu")
CONFIG = Config(dp=2, micro_batch_size=2, n_micro_batches=3)  # 12 samples a step, 6 of each rank


class Numbers(Dataset):
    """Sample i is (i, noise that it draws)."""

    def __init__(self, n_samples):
        self.n_samples = n_samples

    def __len__(self):
        return self.n_samples

    def __getitem__(self, index):
        return index, torch.rand(())


class Stream(IterableDataset):
    def __init__(self, n_samples):
        self.n_samples, self.epoch = n_samples, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return ((100 * self.epoch + index, 0) for index in range(self.n_samples))


def _data(dataset, *, config=CONFIG, rank=0, **reading):
    model_file = SimpleNamespace(build_dataset=lambda: dataset)
    return training_data(model_file, config=config, dp_rank=rank, device=CPU, seed=0, **reading)


def _samples(data, n_steps):
    return [inputs.tolist() for inputs, _ in islice(data, n_steps)]


def _of_both_ranks(dataset, n_steps, **reading):
    return [_samples(_data(dataset, rank=rank, **reading), n_steps) for rank in (0, 1)]


def test_ranks_see_disjoint_samples_of_an_epoch_and_another_order_in_the_next():
    # 30 samples: 2 steps of 12, 6 are left
    parts = _of_both_ranks(Numbers(30), 4)
    epochs = [sum((step for rank in parts for step in rank[2 * e : 2 * e + 2]), []) for e in (0, 1)]
    for seen in epochs:
        assert len(set(seen)) == 24 and set(seen) <= set(range(30))
    assert epochs[0] != epochs[1]


def test_the_last_batch_of_an_epoch_is_filled_up_with_samples_that_it_has_not():
    first, second = _of_both_ranks(Numbers(30), 3, fills=True)
    steps = [a + b for a, b in zip(first, second, strict=True)]
    assert set(sum(steps, [])) == set(range(30))  # in 3 steps of 12: every sample, 6 of them twice
    assert [len(set(step)) for step in steps] == [12, 12, 12]


def test_filling_up_the_last_batch_of_a_stream_is_refused():
    with pytest.raises(
        OptionError, match=r"--fill-last-batch: does nothing, as build_dataset\(\) gives Stream, which can"
    ):
        _data(Stream(30), fills=True)


def test_ranks_share_a_stream_of_samples_in_its_order():
    first, second = _of_both_ranks(Stream(25), 3)
    assert first == [list(range(0, 6)), list(range(12, 18)), list(range(100, 106))]
    assert second == [list(range(6, 12)), list(range(18, 24)), list(range(106, 112))]


class Samples(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class Broken(Numbers):
    def __getitem__(self, index):
        return [][index]


class Augmented(Numbers):
    """Sample i with noise of Python's generator, and NumPy's."""

    def __getitem__(self, index):
        return torch.tensor([random.random(), numpy.random.rand()], dtype=torch.float64), index


@pytest.mark.parametrize("n_workers", [0, 2])
def test_ranks_that_share_a_sample_draw_the_same_from_every_generator(n_workers):
    drawn = []
    for seed in (1, 2):  # as two processes, which began with other numbers
        random.seed(seed)
        numpy.random.seed(seed)
        drawn.append(_samples(data := _data(Augmented(30), n_workers=n_workers), 3))
        data.close()
        assert random.random() == random.Random(seed).random()
        assert numpy.random.rand() == numpy.random.RandomState(seed).rand()
    assert drawn[0] == drawn[1] and len({number for step in drawn[0] for sample in step for number in sample}) == 36


def test_random_batches_are_the_same_on_all_ranks_whatever_draws_them():
    model_file = SimpleNamespace(make_batch=lambda n: (torch.full((n,), random.random()), torch.rand(n)))
    first, second = (training_data(model_file, config=CONFIG, dp_rank=0, device=CPU, seed=3) for _ in range(2))
    for (x, noise), (y, other) in islice(zip(first, second, strict=True), 2):
        assert torch.equal(x, y) and torch.equal(noise, other)


def test_no_sample_draws_in_one_epoch_what_another_draws_in_the_next():
    config = Config(micro_batch_size=12)
    drawn = [noise for _, step in islice(_data(Numbers(12), config=config), 3) for noise in step.tolist()]
    assert len(set(drawn)) == 3 * 12


@pytest.mark.parametrize("dataset", [Numbers(40), Stream(40)], ids=["map", "stream"])
def test_workers_change_no_sample_and_no_number_that_it_draws_and_end_with_the_data(dataset):
    before = torch.random.get_rng_state()
    plain, ahead = (_data(dataset, n_workers=n_workers) for n_workers in (0, 2))
    for (x, noise), (y, other) in islice(zip(plain, ahead, strict=True), 4):
        assert torch.equal(x, y) and torch.equal(noise, other)
    assert multiprocessing.active_children()
    ahead.close()
    assert not multiprocessing.active_children()
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("number", ["TERM", "INT"])
def test_workers_read_on_when_every_process_of_a_job_is_told_to_stop(number):
    data = _data(Numbers(120), n_workers=2)
    _samples(data, 2)  # one of each worker
    workers = multiprocessing.active_children()
    for worker in workers:  # by another process than the one that they read for
        subprocess.run(["kill", f"-{number}", str(worker.pid)], check=True)
    assert len(_samples(data, 8)) == 8 and len(workers) == 2
    data.close()
    assert not multiprocessing.active_children()


class DividesItself(IterableDataset):
    """Numbers, of which each worker gives its own part, as torch's documentation has it."""

    def __init__(self, n_samples):
        self.n_samples = n_samples

    def __iter__(self):
        worker = get_worker_info()
        return iter(
            range(self.n_samples)[slice(None) if worker is None else slice(worker.id, None, worker.num_workers)]
        )


@pytest.mark.parametrize("n_workers", [0, 1, 2])
def test_a_stream_that_divides_itself_over_workers_gives_every_sample_once(n_workers):
    model_file = SimpleNamespace(
        build_dataset=lambda: DividesItself(48), build_eval_dataset=lambda: DividesItself(48), collate=lambda s: (s, s)
    )
    config = Config(micro_batch_size=12)
    training = training_data(model_file, config=config, dp_rank=0, device=CPU, seed=0, n_workers=n_workers)
    evaluation = evaluation_data(model_file, config=config, dp_rank=0, device=CPU, n_workers=n_workers)
    for data in (training, evaluation):
        with closing(data):
            given = sum((samples for samples, _ in islice(data, 4)), [])
        assert given == list(range(48))


class Stuck(Stream):
    """One step, and then nothing."""

    def __iter__(self):
        yield from super().__iter__()
        time.sleep(60)


def test_a_worker_that_never_gives_a_batch_ends_with_the_training(monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)  # seconds that it is given
    data = _data(Stuck(12), n_workers=1)
    _samples(data, 1)
    [worker] = multiprocessing.active_children()
    data.close()
    worker.join(timeout=10)
    assert worker.exitcode == -signal.SIGKILL


class Programs(Numbers):
    """Sample i is how a program ended that a signal was sent to, -15 or -2."""

    def __getitem__(self, index):
        return subprocess.run(["sh", "-c", f"kill -{('TERM', 'INT')[index % 2]} $$"]).returncode, 0


def test_programs_that_a_worker_starts_are_ended_by_signals_as_any_other():
    (codes,) = _samples(_data(Programs(12), config=Config(micro_batch_size=12), n_workers=1), 1)
    assert set(codes) == {-signal.SIGTERM, -signal.SIGINT}


@pytest.mark.parametrize("dataset", [Numbers(30), Stream(30)], ids=["map", "stream"])
@pytest.mark.parametrize("n_steps", [1, 2, 3])
def test_a_restored_position_goes_on_at_the_next_sample(dataset, n_steps):
    # 2 steps an epoch: in the middle of one, at its end, and in the next
    data, undisturbed = _data(dataset, rank=1), _data(dataset, rank=1)
    _samples(data, n_steps)
    resumed = _data(dataset, rank=1)
    resumed.load_state_dict(data.state_dict())
    assert _samples(resumed, 2) == _samples(undisturbed, n_steps + 2)[n_steps:]


@pytest.mark.parametrize("dataset", [Numbers(30), Stream(30)], ids=["map", "stream"])
def test_a_position_holds_under_another_number_of_ranks_and_batch_size(dataset):
    ranks = [_data(dataset, rank=rank) for rank in (0, 1)]
    for data in ranks:
        next(data)
    alone = _data(dataset, config=Config(micro_batch_size=6))
    alone.load_state_dict(ranks[0].state_dict())
    # two steps of 6 samples are the next step of 2 x 6
    assert _samples(alone, 2) == [_samples(data, 1)[0] for data in ranks]


def test_the_position_is_that_of_the_batch_handed_out_not_of_those_read_ahead():
    data = _data(Numbers(40), n_workers=2)
    next(data)
    assert data.state_dict() == {"epoch": 0, "n_samples": 12}
    data.close()
    synthetic = training_data(
        SimpleNamespace(make_batch=lambda n: (torch.rand(n), torch.rand(n))),
        config=CONFIG, dp_rank=1, device=CPU, seed=3,
    )  # fmt: skip
    _, second = next(synthetic), next(synthetic)
    synthetic.load_state_dict({"epoch": 0, "n_samples": 12})
    assert torch.equal(next(synthetic)[0], second[0])


def test_evaluation_takes_the_samples_in_order_once():
    model_file = SimpleNamespace(build_eval_dataset=lambda: Numbers(30))
    data = evaluation_data(model_file, config=CONFIG, dp_rank=1, device=CPU)
    assert _samples(data, None) == [[6, 7, 8, 9, 10, 11], [18, 19, 20, 21, 22, 23]]
    with pytest.raises(OptionError, match="no build_eval_dataset"):
        evaluation_data(SimpleNamespace(), config=CONFIG, dp_rank=0, device=CPU)


@pytest.mark.parametrize("dataset", [Numbers(11), Stream(11)], ids=["map", "stream"])
def test_too_few_samples_are_refused_with_both_numbers(dataset):
    message = (
        r"model.py: build_dataset: found (11|fewer) samples, expected at least one global batch \(12\)\n  fix: more"
    )
    with pytest.raises(DataError, match=message):
        next(_data(dataset))


def test_a_generator_is_refused_for_evaluation_and_when_training_has_read_it():
    data = _data((i, 0) for i in range(24))
    _samples(data, 2)
    with pytest.raises(DataError, match="fix: an object with __iter__ in place of a generator"):
        next(data)
    model_file = SimpleNamespace(build_eval_dataset=lambda: ((i, 0) for i in range(24)))
    with pytest.raises(DataError, match="build_eval_dataset: found generator, which is read only once, expected a"):
        evaluation_data(model_file, config=CONFIG, dp_rank=0, device=CPU)


@pytest.mark.parametrize("wrong", [DataLoader(Numbers(3)), 7])
def test_what_is_no_dataset_is_refused(wrong):
    with pytest.raises(DatasetError, match="build_dataset: found (DataLoader|int), expected a dataset"):
        _data(wrong)


@pytest.mark.parametrize("n_workers", [0, 1])
@pytest.mark.parametrize("kind", [list, lambda samples: Samples(samples)], ids=["map", "stream"])
def test_a_sample_unlike_the_others_is_named_with_its_number_and_the_field(kind, n_workers):
    cases = {
        "inputs: found float32 [5] in sample 7, float32 [4] in others": (torch.zeros(5), 0),
        "inputs: found text in sample 7, float32 [4] in others": ("text", 0),
        "inputs: found NoneType in sample 7, float32 [4] in others": None,
        "targets: found nothing in sample 7, int in others": (torch.zeros(4),),
    }
    for message, odd in cases.items():
        dataset = kind([odd if i == 7 else (torch.zeros(4), 0) for i in range(12)])
        model_file = SimpleNamespace(build_eval_dataset=lambda dataset=dataset: dataset)
        data = evaluation_data(model_file, config=CONFIG, dp_rank=1, device=CPU, n_workers=n_workers)
        with pytest.raises(DataError) as caught:
            next(data)
        said = caught.value.code.splitlines()
        assert said[0] == f"model.py: build_eval_dataset: {message}"
        assert said[1].startswith("  expected: ") and said[2].startswith("  fix: ")
        data.close()


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            lambda i: ({"x": [0.0] * (1 + i % 2)}, 0),
            r"inputs\.x\.1: found (float|nothing) in sample \d+, (float|nothing) in others",
        ),
        (lambda i: (torch.zeros(4), None), r"found targets of type NoneType\n  expected: tensors"),
        (lambda i: None, r"found sample of type NoneType\n  expected: tensors"),
        (lambda i: torch.zeros(4), r"a sample is float32 \[4\]\n  expected: \(inputs, targets\)"),
        (lambda i: (0, 0, 0), r"a sample is a tuple of 3\n  expected: \(inputs, targets\)"),
    ],
)
def test_samples_that_make_no_batch_are_refused_with_what_is_wrong(sample, message):
    with pytest.raises(DataError, match=rf"^model.py: build_dataset: {message}(.|\n)*  fix: "):
        next(_data([sample(i) for i in range(12)]))


def test_a_batch_that_is_no_pair_is_refused_with_what_collate_returned():
    model_file = SimpleNamespace(build_dataset=lambda: Numbers(12), collate=lambda samples: samples)
    with pytest.raises(DataError, match=r"build_dataset: collate\(samples\) returned a list of 6\n"):
        next(training_data(model_file, config=CONFIG, dp_rank=0, device=CPU, seed=0))


def _fail(samples):
    return samples[len(samples)]


@pytest.mark.parametrize("n_workers", [0, 1])
@pytest.mark.parametrize("name", ["dataset", "collate"])
def test_an_error_of_the_model_files_own_code_keeps_its_traceback(name, n_workers):
    model_file = SimpleNamespace(build_dataset=lambda: Broken(12) if name == "dataset" else Numbers(12))
    if name == "collate":
        model_file.collate = _fail
    data = training_data(model_file, config=CONFIG, dp_rank=0, device=CPU, seed=0, n_workers=n_workers)
    with pytest.raises(IndexError) as caught:
        next(data)
    data.close()
    told = "".join(traceback.format_exception(caught.value))
    assert ("in __getitem__" if name == "dataset" else "in _fail") in told and "list index out of range" in told


def test_an_error_of_torch_that_no_sample_explains_stays_as_it_is(monkeypatch):
    def full(*_, **__):
        raise RuntimeError("unable to allocate shared memory")

    monkeypatch.setattr("torch.stack", full)
    with pytest.raises(RuntimeError, match="unable to allocate"):
        next(_data([(torch.zeros(4), 0)] * 12))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (("text", 0), r"inputs: found text, planned floating-point numbers of shape \[4\]"),
        (({"y": torch.zeros(4)}, 0), r"inputs: found inputs\.y, planned floating-point"),
        ((torch.zeros(5), 0), r"inputs: found floating-point numbers of shape \[5\]"),
        ((numpy.zeros(4), 0.5), r"targets: found floating-point numbers of shape \[\] per sample, planned int64"),
    ],
)
def test_an_error_on_a_batch_unlike_those_planned_for_says_how_it_differs(sample, message):
    model_file = SimpleNamespace(
        build_dataset=lambda: [sample] * 12,
        make_batch=lambda n: (numpy.zeros((n, 4), dtype="float32"), torch.zeros(n, dtype=torch.int64)),
    )
    data = training_data(model_file, config=CONFIG, dp_rank=0, device=CPU, seed=0)
    batch = next(data)
    with pytest.raises(RuntimeError, match="^of torch") as caught, data.explaining(batch):
        raise RuntimeError("of torch")
    assert re.match(rf"model.py: build_dataset: {message}(.|\n)*  fix: if that is why", caught.value.__notes__[0])
    with pytest.raises(torch.OutOfMemoryError) as caught, data.explaining(batch):
        raise torch.OutOfMemoryError("of the device")
    assert not hasattr(caught.value, "__notes__")


class Exhausted:
    """A dataset that draws its samples from an iterator, which has none."""

    def __getitem__(self, index):
        return next(iter(()))

    def __len__(self):
        return 12


@pytest.mark.parametrize(("n_workers", "part"), [(0, {}), (1, {}), (0, {"collate": lambda samples: next(iter(()))})])
def test_stop_iteration_of_samples_is_an_error_and_no_end_of_the_epoch(n_workers, part):
    dataset = Numbers(12) if part else Exhausted()
    model_file = SimpleNamespace(build_dataset=lambda: dataset, **part)
    data = training_data(model_file, config=CONFIG, dp_rank=0, device=CPU, seed=0, n_workers=n_workers)
    with closing(data), pytest.raises(RuntimeError, match="raised StopIteration, which would end the epoch"):
        next(data)


def test_an_error_on_a_batch_like_those_planned_for_stays_as_it_is():
    model_file = SimpleNamespace(
        build_dataset=lambda: [(numpy.zeros(4), 0)] * 12,
        make_batch=lambda n: (torch.zeros(n, 4), torch.zeros(n, dtype=torch.int64)),
    )
    data = training_data(model_file, config=CONFIG, dp_rank=0, device=CPU, seed=0)
    with pytest.raises(RuntimeError, match="^of torch$"), data.explaining(next(data)):
        raise RuntimeError("of torch")


def test_an_error_about_an_index_says_which_values_the_batch_has():
    model_file = SimpleNamespace(build_dataset=lambda: [(torch.zeros(4), -i) for i in range(12)])
    data = training_data(model_file, config=Config(micro_batch_size=12), dp_rank=0, device=CPU, seed=0)
    with pytest.raises(IndexError) as caught, data.explaining(next(data)):
        raise IndexError("Target -11 is out of bounds")
    assert caught.value.__notes__ == ["model.py: build_dataset: targets: found values from -11 to 0 in this batch"]


def test_an_error_about_figures_that_are_not_finite_says_which_tensor_of_the_batch_has_such():
    data = _data([(torch.tensor([0.0, math.nan]), 0)] * 12)
    with pytest.raises(FloatingPointError) as caught, data.explaining(next(data)):
        raise FloatingPointError("of the step")
    other = _data([(torch.zeros(2), 0)] * 12)
    with pytest.raises(FloatingPointError) as plain, other.explaining(next(other)):
        raise FloatingPointError("of the step")
    assert caught.value.__notes__ == ["model.py: build_dataset: inputs: found 6 numbers that are not finite"]
    assert not hasattr(plain.value, "__notes__")


def test_arrays_become_tensors_whoever_makes_the_batch():
    model_file = SimpleNamespace(
        make_batch=lambda n: ({"x": numpy.zeros((n, 4))[:, ::-1]}, numpy.arange(n)),
        build_eval_dataset=lambda: [(numpy.zeros(4), 0)] * 12,
        collate=lambda samples: (numpy.stack([x for x, _ in samples]), numpy.array([y for _, y in samples])),
    )
    inputs, targets = next(training_data(model_file, config=CONFIG, dp_rank=1, device=CPU, seed=0))
    assert inputs["x"].shape == (6, 4) and targets.tolist() == [6, 7, 8, 9, 10, 11]
    inputs, targets = local_batch(model_file.make_batch(12), config=CONFIG, dp_rank=1)
    assert inputs["x"].shape == (6, 4) and targets.tolist() == [6, 7, 8, 9, 10, 11]
    _, targets = local_batch((numpy.zeros(12), numpy.arange(12, dtype=">i8")), config=CONFIG, dp_rank=1)
    assert targets.tolist() == [6, 7, 8, 9, 10, 11]
    inputs, targets = next(evaluation_data(model_file, config=CONFIG, dp_rank=0, device=CPU))
    assert inputs.shape == (6, 4) and targets.shape == (6,)


def test_the_model_file_may_collate_by_itself():
    model_file = SimpleNamespace(
        build_dataset=lambda: Numbers(12), collate=lambda samples: (torch.tensor([i for i, _ in samples]) * 10, None)
    )
    data = training_data(model_file, config=CONFIG, dp_rank=0, device=CPU, seed=0)
    assert isinstance(data, TrainingData)
    assert all(value % 10 == 0 for value in next(data)[0].tolist())


def test_random_batches_are_drawn_for_each_step_or_a_few_repeated():
    model_file = SimpleNamespace(make_batch=lambda size: (torch.rand(size), torch.rand(size)))
    reading = {"config": CONFIG, "dp_rank": 1, "device": CPU, "seed": 0}

    def drawn(**options):
        return [torch.stack(batch) for batch in islice(training_data(model_file, **reading, **options), 5)]

    every, few = drawn(), drawn(n_different=2)
    assert all(not torch.equal(a, b) for i, a in enumerate(every) for b in every[:i])
    assert all(torch.equal(batch, every[step % 2]) for step, batch in enumerate(few))
    data = training_data(model_file, **reading, n_different=2)
    data.load_state_dict({"epoch": 0, "n_samples": 3 * CONFIG.global_batch_size})
    assert torch.equal(torch.stack(next(data)), every[1])
    with pytest.raises(OptionError, match="--repeat-batches: found 0, expected 1 or more"):
        drawn(n_different=0)


def test_a_step_on_a_gpu_waits_for_the_copy_of_the_next_batch_only_at_its_end_and_counts_its_own_retries(monkeypatch):
    order = []
    stream = SimpleNamespace(synchronize=lambda: order.append("own stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("all streams"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    peaks = {f"{name}_bytes": {"all": {"peak": 1}} for name in ("allocated", "reserved")}
    stats = lambda device: peaks | {"num_alloc_retries": 3 + 2 * order.count("step")}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    model = SimpleNamespace(
        mesh=SimpleNamespace(device=torch.device("cuda")),
        config=SimpleNamespace(global_batch_size=1, n_ranks=1),
        step=lambda batch: order.append("step") or torch.zeros(()),
        grad_norm=torch.zeros(()),
        learning_rate=0.1,
        loss_scale=None,
        was_updated=True,
    )
    record = timed_step(model, None, 0)
    assert order == ["own stream", "step", "all streams"]
    assert record.n_retries_for_memory == 2
