"""Units: what a text means, what is refused, and what a report prints."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan import units

as_bytes = partial(units.parse_quantity, units=units.BYTE_UNITS)
as_seconds = partial(units.parse_quantity, units=units.SECOND_UNITS)
as_ratio = partial(units.parse_quantity, units=units.RATIO_UNITS)
as_flops_per_s = partial(units.parse_quantity, units=units.FLOP_RATE_UNITS)
as_port_rate = partial(units.parse_quantity, units=units.BIT_RATE_UNITS)


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (as_bytes, "80 GiB", 80 * 2**30),
        (as_bytes, "80 GB", 80_000_000_000),
        (as_bytes, "81920MiB", 80 * 2**30),  # 81,920 MiB = 80 x 1024 MiB
        (units.parse_bytes_per_s, "2039 GB/s", 2.039e12),
        (units.parse_bytes_per_s, "400 Gbit/s", 50e9),  # 400 / 8
        (as_flops_per_s, "312 TFLOP/s", 312e12),
        (as_seconds, "5 us", 5e-6),
        (as_seconds, "1.5 h", 5400.0),
        (units.parse_usd_per_hour, "1.5 USD/h", 1.5),
        (as_ratio, "86.9 %", 0.869),
        (units.parse_bytes_per_s, "3e2 GB/s", 300e9),
    ],
)
def test_a_text_with_a_unit_becomes_a_number_in_base_units(parse, text, expected):
    assert parse(text) == pytest.approx(expected, rel=1e-12)


def test_gib_is_seven_percent_more_than_gb():
    # 2**30 / 10**9 = 1.073741824
    assert as_bytes("1 GiB") / as_bytes("1 GB") == 1.073741824


@pytest.mark.parametrize(
    "text", ["80", "", "GiB", "nan GiB", "inf GiB", "1e999 GiB", "0 GiB", "-80 GiB", "8O GiB", "1_0 GiB"]
)
def test_a_number_without_unit_or_without_a_positive_finite_value_is_refused(text):
    with pytest.raises(ValueError):
        as_bytes(text)


@pytest.mark.parametrize(
    ("parse", "text", "advice"),
    [
        (units.parse_bytes_per_s, "200 Gb", 'unknown unit "Gb"; use "Gbit/s" or "GB/s"'),
        (units.parse_bytes_per_s, "200 Gbps", 'use "Gbit/s" or "GB/s"'),
        (as_bytes, "80", 'no unit; use "GB" or "GiB"'),
        (as_bytes, "80 GB/s", 'unknown unit "GB/s"'),
        (as_flops_per_s, "312 TFLOPS", 'use "TFLOP/s"'),
        (as_port_rate, "400 GB/s", 'use "Gbit/s"'),
        (as_seconds, "0 us", "leave the field out"),
        (as_seconds, "14days", 'unknown unit "days"; use "d"'),
        (as_seconds, "2 hours", 'use "h"'),
        (as_seconds, "3x", 'unknown unit "x"; use "us" or "h"'),
    ],
)
def test_a_refused_text_is_answered_with_what_to_write(parse, text, advice):
    with pytest.raises(ValueError) as error:
        parse(text)
    assert advice in str(error.value)


@given(st.text(max_size=20))
def test_any_text_is_parsed_or_refused_with_value_error(text):
    try:
        assert 0 < units.parse_bytes_per_s(text) < float("inf")
    except ValueError:
        pass


@given(st.integers(1, 2**40))
def test_parsing_a_printed_byte_count_gives_it_back(n_bytes):
    assert as_bytes(f"{n_bytes} B") == n_bytes


@given(st.integers(units.KiB, 2**45))
def test_a_formatted_byte_count_is_within_its_last_digit(n_bytes):
    # One decimal of a number of at least 1.0: at most 0.05 / 1.0 away.
    assert as_bytes(units.format_bytes(n_bytes)) == pytest.approx(n_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_bytes(80 * 2**30), "80.0 GiB"),
        (units.format_bytes(1536), "1.5 KiB"),
        (units.format_bytes(12), "12 B"),
        (units.format_bytes(-3 * 2**30), "-3.0 GiB"),
        (units.format_seconds(0.00123456), "1.23 ms"),
        (units.format_seconds(5e-6), "5 us"),
        (units.format_seconds(12.3), "12.3 s"),
        (units.format_seconds(7200), "2 h"),
        (units.format_seconds(0), "0 s"),
        (units.format_rate(2.039e12), "2.04 TB/s"),
        (units.format_rate(50e9), "50 GB/s"),
        (units.format_flops_per_s(312e12), "312 TFLOP/s"),
        (units.format_usd(1.5), "1.50 USD"),
        (units.format_usd(12345.4), "12,345 USD"),
    ],
)
def test_reports_print_quantities_with_three_digits_and_a_unit(text, expected):
    assert text == expected
