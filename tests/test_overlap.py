"""What compute and communication take longer while both run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.overlap import Overlap

shares = st.floats(0.0, 0.99)


def test_a_second_of_compute_hides_more_communication_where_that_is_slowed_less():
    assert Overlap(communication_exposed=0.5, compute_exposed=0.25).hidden_per_compute == 3 / 2
    assert Overlap(communication_exposed=0.25, compute_exposed=0.5).hidden_per_compute == 2 / 3


@given(shares, shares)
def test_streams_that_end_together_take_the_same_by_either_formula(beta, gamma):
    compute_s, communication_s = 1.0, Overlap(beta, gamma).hidden_per_compute
    assert compute_s + beta * communication_s == pytest.approx(communication_s + gamma * compute_s)
