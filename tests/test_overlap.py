"""What compute and communication take longer while both run: as shares that are exposed, and as factors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.overlap import Overlap

shares = st.floats(0.0, 0.99)


def test_shares_of_a_half_and_a_quarter_as_factors():
    # c = (1 - 1/8) / (1/2), m = (1 - 1/8) / (3/4)
    overlap = Overlap(communication_exposed=0.5, compute_exposed=0.25)
    assert overlap.compute_slowdown == pytest.approx(7 / 4)
    assert overlap.communication_slowdown == pytest.approx(7 / 6)
    assert overlap.hidden_per_compute == pytest.approx(3 / 2)


@given(shares, shares)
def test_the_factors_give_the_shares_again(beta, gamma):
    overlap = Overlap(beta, gamma)
    c, m = overlap.compute_slowdown, overlap.communication_slowdown
    assert m * (1 - 1 / c) == pytest.approx(beta)
    assert c * (1 - 1 / m) == pytest.approx(gamma)
    assert overlap.hidden_per_compute == pytest.approx(c / m)


@given(shares)
def test_equal_shares_slow_both_by_the_same_factor(share):
    overlap = Overlap(share, share)
    assert overlap.hidden_per_compute == 1.0
    assert overlap.compute_slowdown == overlap.communication_slowdown == 1.0 + share
