"""Which ranks of a pipeline share a process group, and that steps use these and no other."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoplan.runtime.config import Config
from autoplan.runtime.mesh import build_rank_mesh
from tests.distributed.launch import run_ranks

CHAIN = ((0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2))
NEIGHBOURS = {
    ("1f1b", 4, 1): CHAIN,
    ("interleaved", 4, 1): CHAIN,
    ("interleaved", 4, 2): (*CHAIN, (3, 0), (0, 3)),
    ("interleaved", 2, 2): ((0, 1), (1, 0)),
    ("zero_bubble_v", 4, 2): CHAIN,
    ("zero_bubble_v", 3, 2): CHAIN[:4],
    ("1f1b", 1, 1): (),
}


@pytest.mark.parametrize(("schedule", "pp", "n_chunks"), NEIGHBOURS)
def test_neighbours_are_the_ranks_of_stages_that_follow_one_another(schedule: str, pp: int, n_chunks: int) -> None:
    config = Config(pp=pp, schedule=schedule, n_chunks=n_chunks)
    assert config.neighbours() == NEIGHBOURS[schedule, pp, n_chunks]


def made_groups(schedules: list[str]) -> list[dict[str, Any]]:
    """For each schedule, with pp 2 and dp 2: the groups of the neighbours of this rank, and all that it made."""
    found = []
    for schedule in schedules:
        asked: list[list[int]] = []
        make = dist.new_group

        def spy(ranks: Any = None, *args: Any, **options: Any) -> Any:
            asked.append(list(ranks))  # noqa: B023
            return make(ranks, *args, **options)  # noqa: B023

        dist.new_group = spy
        mesh = build_rank_mesh(Config(pp=2, dp=2, n_micro_batches=2, schedule=schedule), "cpu")
        dist.new_group = make
        groups = mesh.p2p_groups
        members = {pair: dist.get_process_group_ranks(group) for pair, group in groups.items()}
        timeouts = {group._get_backend(torch.device("cpu")).options._timeout for group in groups.values()}
        found.append({"members": members, "names": {group.group_name for group in groups.values()}})
        found[-1] |= {"asked": asked, "timeouts": timeouts}
    return found


def test_each_pair_of_neighbours_has_a_group_and_one_each_way_where_ranks_receive_ahead() -> None:
    ranks = run_ranks(made_groups, 4, ["1f1b", "interleaved"], timeout_s=99.0)
    for number, n_groups in enumerate((1, 2)):
        for rank, found in enumerate(own[number] for own in ranks):
            column = [rank % 2, rank % 2 + 2]
            assert found["members"] == {(0, 1): column, (1, 0): column}
            assert len(found["names"]) == n_groups
            assert found["timeouts"] == {timedelta(seconds=99)}  # that of the run, not that of the backend
            assert found["asked"] == ranks[0][number]["asked"]  # in the same order on every rank
