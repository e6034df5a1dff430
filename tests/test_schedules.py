"""Schedules: their order, and what `checked_order` refuses."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.errors import InputError, UsageError
from autoplan.registry import load_table
from autoplan.runtime import Config
from autoplan.schedules import (
    Action,
    checked_order,
    dependency,
    ordered_schedule,
    splits_backward,
    stage_ranks,
)

GOLDEN = Path(__file__).parent / "golden" / "schedules"


def read_schedule(text):
    """The schedule of a golden text."""
    return tuple(
        tuple(Action(int(stage), kind, int(number)) for stage, kind, number in re.findall(r"(\d+)([FBIW])(\d+)", line))
        for line in (line.partition(":")[2] for line in text.splitlines())
    )


def most_in_flight(actions):
    """The most micro-batches x stages between their forward pass and the gradients of their weights at once."""
    count = most = 0
    for action in actions:
        count += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        most = max(most, count)
    return most


@st.composite
def ordered_schedules(draw):
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble_v"]))
    n_ranks = draw(st.integers(1, 5))
    if name == "interleaved":
        n_chunks, n_micro_batches = draw(st.integers(1, 4)), n_ranks * draw(st.integers(1, 3))
    elif name == "zero_bubble_v":
        n_chunks, n_micro_batches = 2, draw(st.integers(1, 12))
    else:
        n_chunks, n_micro_batches = 1, draw(st.integers(1, 9))
    return ordered_schedule(name, n_ranks=n_ranks, n_chunks=n_chunks, n_micro_batches=n_micro_batches)


@pytest.mark.parametrize(
    ("name", "n_ranks", "n_chunks", "n_micro_batches"),
    [
        ("gpipe", 2, 1, 3),
        ("1f1b", 4, 1, 8),
        ("interleaved", 2, 2, 4),
        ("interleaved", 4, 2, 8),
        ("interleaved", 4, 1, 8),
        ("zero_bubble_v", 2, 2, 4),
    ],
)
def test_schedule_equals_its_golden_text(name, n_ranks, n_chunks, n_micro_batches):
    schedule = ordered_schedule(name, n_ranks=n_ranks, n_chunks=n_chunks, n_micro_batches=n_micro_batches).schedule
    golden = GOLDEN / f"{name}_{n_ranks}x{n_chunks}_{n_micro_batches}.txt"
    assert (
        "".join(f"rank {rank}: {' '.join(map(str, row))}\n" for rank, row in enumerate(schedule)) == golden.read_text()
    )


@given(ordered_schedules())
def test_the_order_of_all_actions_keeps_rank_order_and_dependencies(ordered):
    schedule, order = ordered.schedule, ordered.actions
    n_stages = 1 + max(action.stage for actions in schedule for action in actions)
    place = {action: index for index, action in enumerate(order)}
    assert len(place) == len(order) == sum(len(actions) for actions in schedule)
    for actions in schedule:
        assert [place[action] for action in actions] == sorted(place[action] for action in actions)
    for action in order:
        needed = dependency(action, n_stages)
        assert needed is None or place[needed] < place[action]


@given(st.integers(1, 8), st.integers(1, 20))
def test_1f1b_holds_at_most_as_many_micro_batches_as_ranks_from_here_on(n_ranks, n_micro_batches):
    schedule = ordered_schedule("1f1b", n_ranks=n_ranks, n_micro_batches=n_micro_batches).schedule
    expected = [min(n_micro_batches, n_ranks - rank) for rank in range(n_ranks)]
    assert [most_in_flight(actions) for actions in schedule] == expected


def test_gpipe_holds_all_micro_batches():
    assert [
        most_in_flight(actions) for actions in ordered_schedule("gpipe", n_ranks=3, n_micro_batches=7).schedule
    ] == [7, 7, 7]


def test_interleaved_holds_its_warm_up_and_one_more():
    # 4 ranks, 3 chunks: warm-up (3 - 1) x 4 + 2 x (3 - rank) = 14, 12, 10, 8 forward passes, then one more before B
    schedule = ordered_schedule("interleaved", n_ranks=4, n_chunks=3, n_micro_batches=8).schedule
    assert [most_in_flight(actions) for actions in schedule] == [15, 13, 11, 9]


@given(st.integers(1, 6), st.integers(1, 20))
def test_zero_bubble_v_holds_two_stages_of_at_most_as_many_micro_batches_as_ranks(n_ranks, n_micro_batches):
    # as much as 1F1B on its first rank, but on every rank: 2 n_ranks stages of half the size
    schedule = ordered_schedule("zero_bubble_v", n_ranks=n_ranks, n_chunks=2, n_micro_batches=n_micro_batches).schedule
    assert max(map(most_in_flight, schedule)) <= 2 * n_ranks
    if n_micro_batches >= 2 * n_ranks - 1:
        assert max(map(most_in_flight, schedule)) == 2 * n_ranks


def test_zero_bubble_v_goes_down_the_ranks_and_up_again():
    schedule = ordered_schedule("zero_bubble_v", n_ranks=3, n_chunks=2, n_micro_batches=5).schedule
    assert stage_ranks(schedule) == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize("name", load_table("autoplan.schedules", "SCHEDULES"))
def test_an_ordered_schedule_knows_the_place_of_what_each_action_needs_of_another_rank(name):
    n_chunks = 1 if name in ("gpipe", "1f1b") else 2
    ordered = ordered_schedule(name, n_ranks=3, n_micro_batches=6, n_chunks=n_chunks)
    for action, place in zip(ordered.actions, ordered.awaited, strict=True):
        needed = dependency(action, 3 * n_chunks)
        is_far = needed is not None and ordered.ranks[needed.stage] != ordered.ranks[action.stage]
        assert (None if place is None else ordered.actions[place]) == (needed if is_far else None)


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_a_sendrecv_of_1f1b_swaps_an_activation_for_a_gradient_until_one_of_both_is_the_last(n_ranks):
    n_micro_batches = 6
    ordered = ordered_schedule("1f1b", n_ranks=n_ranks, n_micro_batches=n_micro_batches, n_chunks=1)
    found = {str(action) for action, is_sendrecv in zip(ordered.actions, ordered.sendrecvs, strict=True) if is_sendrecv}
    # between ranks r and r + 1 of p: the gradient of micro-batch k for the activation of micro-batch k + p - 1 - r
    pairs = [(r, k, k + n_ranks - 1 - r) for r in range(n_ranks - 1) for k in range(n_micro_batches)]
    pairs = [pair for pair in pairs if pair[2] < n_micro_batches]
    assert found == {text for r, k, later in pairs for text in (f"{r}B{k}", f"{r + 1}F{later}")}


def test_all_activations_go_before_the_first_gradient_under_gpipe():
    assert not any(ordered_schedule("gpipe", n_ranks=3, n_micro_batches=6, n_chunks=1).sendrecvs)


@pytest.mark.parametrize("name", load_table("autoplan.schedules", "SCHEDULES"))
@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_the_runtime_has_each_stage_on_the_rank_of_the_schedule(name, n_ranks):
    n_chunks = 1 if name in ("gpipe", "1f1b") else 2
    schedule = ordered_schedule(name, n_ranks=n_ranks, n_chunks=n_chunks, n_micro_batches=2 * n_ranks).schedule
    config = Config(pp=n_ranks, n_chunks=n_chunks, schedule=name)
    assert tuple(map(config.rank_of_stage, range(config.n_stages))) == stage_ranks(schedule)
    assert config.splits_backward == splits_backward(name) == any(action.kind == "W" for action in schedule[0])


class RecordingStage:
    """Stands for torch's pipeline stage and writes down what the schedule asks it to do."""

    def __init__(self, stage_index):
        self.stage_index = stage_index
        self.actions = []

    def forward_one_chunk(self, micro_batch, *_, **__):
        self.actions.append(Action(self.stage_index, "F", micro_batch))

    def backward_one_chunk(self, micro_batch, **__):
        self.actions.append(Action(self.stage_index, "B", micro_batch))

    def perform_reduce_grad(self, *_):
        pass

    def get_fwd_recv_ops(self, _):
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops


def actions_torch_runs(torch_class, *, rank, n_ranks, n_micro_batches):
    """What torch's own step does on one rank, with communication and compute left out."""
    stage = RecordingStage(rank)
    schedule = object.__new__(torch_class)
    vars(schedule).update(
        _stage=stage,
        _num_stages=n_ranks,
        _n_microbatches=n_micro_batches,
        scale_grads=True,
        _check_inputs=lambda *_: ([()] * n_micro_batches, [{}] * n_micro_batches),
        _initialize_stage=lambda *_: None,
        _maybe_compute_loss=lambda *_: None,
        _maybe_get_loss=lambda *_: None,
        _update_losses=lambda *_: None,
    )
    schedule._step_microbatches()
    return tuple(stage.actions)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("n_ranks", "n_micro_batches"), [(1, 3), (2, 2), (3, 7), (4, 4), (4, 9)])
def test_order_is_what_torch_runs(name, n_ranks, n_micro_batches):
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    torch_class = {"gpipe": torch_schedules.ScheduleGPipe, "1f1b": torch_schedules.Schedule1F1B}[name]
    schedule = ordered_schedule(name, n_ranks=n_ranks, n_micro_batches=n_micro_batches).schedule
    for rank, actions in enumerate(schedule):
        counts = {"n_ranks": n_ranks, "n_micro_batches": n_micro_batches}
        assert actions == actions_torch_runs(torch_class, rank=rank, **counts)


@pytest.mark.parametrize(
    ("n_ranks", "n_chunks", "n_micro_batches"), [(1, 2, 3), (2, 2, 4), (2, 3, 2), (4, 2, 12), (4, 1, 8), (3, 1, 3)]
)
def test_interleaved_order_is_that_of_torch(n_ranks, n_chunks, n_micro_batches):
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = SimpleNamespace(
        n_local_stages=n_chunks,
        microbatches_per_round=n_ranks,  # as torch computes it when n_micro_batches is a multiple of n_ranks
        pp_group_size=n_ranks,
        _n_microbatches=n_micro_batches,
    )
    calculate = torch_schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations
    schedule = ordered_schedule(
        "interleaved", n_ranks=n_ranks, n_chunks=n_chunks, n_micro_batches=n_micro_batches
    ).schedule
    for rank, actions in enumerate(schedule):
        assert " ".join(map(str, actions)) == " ".join(str(a) for a in calculate(theirs, rank) if a is not None)


@pytest.mark.parametrize(("n_ranks", "n_micro_batches"), [(1, 3), (2, 1), (2, 4), (3, 5), (4, 3), (4, 12)])
def test_zero_bubble_v_order_is_that_of_torch(n_ranks, n_micro_batches):
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = SimpleNamespace(pp_group_size=n_ranks, num_stages=2 * n_ranks, _n_microbatches=n_micro_batches)
    calculate = torch_schedules.ScheduleZBVZeroBubble._calculate_single_rank_operations
    schedule = ordered_schedule("zero_bubble_v", n_ranks=n_ranks, n_chunks=2, n_micro_batches=n_micro_batches).schedule
    for rank, actions in enumerate(schedule):
        assert " ".join(map(str, actions)) == " ".join(str(a) for a in calculate(theirs, rank) if a is not None)


@pytest.mark.parametrize(
    ("name", "n_ranks", "n_chunks", "n_micro_batches"),
    [("interleaved", 2, 2, 4), ("interleaved", 4, 1, 8), ("interleaved", 3, 4, 6), ("zero_bubble_v", 3, 2, 7)],
)
def test_sends_and_receives_are_called_where_torch_calls_them(name, n_ranks, n_chunks, n_micro_batches):
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    ordered = ordered_schedule(name, n_ranks=n_ranks, n_chunks=n_chunks, n_micro_batches=n_micro_batches)
    ranks = stage_ranks(ordered.schedule)
    calls = [[] for _ in range(n_ranks)]
    for (stage, kind, micro_batch), call in zip(ordered.actions, ordered.calls, strict=True):
        rank, what = ranks[stage], "F" if kind == "F" else "B"
        calls[rank].append(f"{stage}{kind}{micro_batch}")
        if call is not None:
            next_stage = stage + 1 if kind == "F" else stage - 1
            assert ranks[next_stage] == call.receiver
            calls[rank].append(f"{stage}SEND_{what}{micro_batch}")
            calls[call.receiver].append(f"{next_stage}RECV_{what}{micro_batch}")
    computed = {
        rank: [torch_schedules._Action.from_str(str(action)) for action in actions]
        for rank, actions in enumerate(ordered.schedule)
    }
    theirs = torch_schedules._add_send_recv(computed, ranks.__getitem__, n_ranks * n_chunks)
    assert [[str(action) for action in theirs[rank]] for rank in range(n_ranks)] == calls


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0: 0F0 0F0 0B0\n", r"schedule: found '0F0 2 times'"),
        ("rank 0: 0F0 0B0 0B1\n", r"schedule: found '0F1 0 times'"),
        ("rank 0: 0F0 0I0\n", r"schedule: found '0W0 0 times'"),
        ("rank 0: 0F0 0W0 0I0\n", r"rank 0, action 1: found '0W0'\n  expected: 0I0 to run before it"),
        ("rank 0: 0F0 0I0 0W0 0F1 0B1\n", r"rank 0, action 4: found '0B1'\n  expected: F or I or W"),
        ("rank 0: 0F0 1F0 0B0 1B0\nrank 1:\n", r"rank 0: found '2 stages'\n  expected: 1,"),
        ("rank 0: 0B0 0F0\n", r"rank 0, action 0: found '0B0'\n  expected: 0F0 to run before it"),
        ("rank 0: 0F0 1F0 0B0\nrank 1: 1B0\n", r"rank 1, action 0: found '1B0'\n  expected: rank 0 to run it"),
        ("rank 0: 0F0 0B0 2F0\nrank 1: 1F0 1B0\n", r"rank 0, action 2: found '2F0'\n  expected: stage 0 to 1"),
        ("rank 0: 0F0 0F1 0B1 0B0\n", r"rank 0, action 3: found '0B0'\n  expected: no lower micro-batch than 1"),
        # rank 0 wants the gradient of micro-batch 0 first, rank 1 the activation of micro-batch 1: both wait for ever
        (
            "rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1\n",
            r"rank 0, action 1: found '0B0'\n  expected: 1B0 .*dead",
        ),
    ],
)
def test_check_names_the_place_of_the_fault(text, message):
    schedule = read_schedule(text)
    with pytest.raises(InputError, match=message):
        checked_order(schedule, n_ranks=len(schedule), n_chunks=1)


def test_check_counts_the_ranks():
    with pytest.raises(InputError, match="found '1 ranks'\n  expected: 2"):
        checked_order(read_schedule("rank 0: 0F0 0B0"), n_ranks=2, n_chunks=1)


def test_unknown_name_lists_the_valid_ones():
    with pytest.raises(UsageError, match="one of 1f1b, gpipe, interleaved, zero_bubble_v"):
        ordered_schedule("zigzag", n_ranks=2, n_micro_batches=2)


@pytest.mark.parametrize(
    ("name", "n_ranks", "n_chunks", "n_micro_batches", "message"),
    [
        ("1f1b", 2, 2, 4, "n_chunks: found 2"),
        ("gpipe", 2, 2, 4, "n_chunks: found 2"),
        ("zero_bubble_v", 2, 1, 4, "n_chunks: found 1\n  expected: 2"),
        ("interleaved", 4, 2, 6, "n_micro_batches: found 6\n  expected: a multiple of pp = 4"),
        ("1f1b", 0, 1, 4, "pp: found 0"),
        ("1f1b", 2, 1, 0, "n_micro_batches: found 0"),
    ],
)
def test_numbers_a_schedule_does_not_exist_for_are_refused(name, n_ranks, n_chunks, n_micro_batches, message):
    with pytest.raises(InputError, match=message):
        ordered_schedule(name, n_ranks=n_ranks, n_chunks=n_chunks, n_micro_batches=n_micro_batches)
