"""What the host adds: hiding in its lead, and shares of fully_shard."""

import pytest

from autoplan.cost.launch import PassSeconds, late_share, launch
from autoplan.hardware import ShardingHost
from autoplan.measure_hardware.host_shares import ShardedPasses, sharding_host


@pytest.mark.parametrize(
    ("device", "first_s", "last_s", "repeats", "expected"),
    [
        ((1, 1), 1, 4, True, (2, 1, 5)),  # no lead: 1 more in the first pass, 2 + 4 - 1 - 1 = 4 in the last
        ((5, 6), 4, 12, False, (0, 0, 10)),  # 3 + 4 - 5 = 2; no lead is left: 2 + 12 - 6 = 8
        ((5, 6), 4, 12, True, (0, 0, 2)),  # a lead of 2 + 6 from other micro-batches hides the 8
    ],
)
def test_what_the_host_does_once_hides_in_its_lead(device, first_s, last_s, repeats, expected) -> None:
    found = launch(PassSeconds(3, 2), PassSeconds(*device), first_s=first_s, last_s=last_s, repeats=repeats)
    assert (found.forward_s, found.backward_s, found.once_s) == expected


@pytest.mark.parametrize(("host_s", "device_s", "share"), [(4, 3, 0.25), (4, 5, 0), (0, 0, 0), (4, 0, 1)])
def test_what_the_host_began_with_the_device_is_late_by_what_it_takes_longer(host_s, device_s, share) -> None:
    assert late_share(host_s, device_s) == share


def test_shares_of_the_host_are_found_again_in_passes_made_of_them() -> None:
    def passes(stage: int | None, n: int) -> ShardedPasses:
        """Hooks 10 + n, gather 100 + 2 n, reduce 200 + 3 n, optimizer 7 n; 5 a pass without `fully_shard`."""
        hooks, gather, reduce = 10 + n, 100 + 2 * n, 200 + 3 * n
        forward, backward = {
            None: (5, 5),
            1: (5 + hooks, 5 + hooks),
            3: (5 + hooks + gather, 5 + hooks + gather + reduce),
        }[stage]
        last = backward + (reduce if stage == 1 else 0)
        return ShardedPasses(stage, n, (forward,) * 4, (backward,) * 3 + (last,), 7.0 * n)

    found = sharding_host([passes(stage, n) for n in (2, 16) for stage in (None, 1, 3)])
    assert found == ShardingHost(10, 1, 100, 2, 200, 3, 7)
