"""How far a prediction can be off: errors of earlier predictions, and the interval that follows from them.

    error = ln(measured / predicted) of one run, rms = root of the mean of error^2 over n runs
    interval = predicted x exp(-h) to predicted x exp(h),   h = t(n) x rms

t(n) is the 95 % quantile of Student's t distribution with n degrees of freedom (`student_t_quantile`), so that the next
run falls into the interval with a chance of 90 %, half of the misses on either side; the fewer runs are known, the
wider it is. Where links were found to be faster at one time than at another, rms is sqrt(rms^2 + drift^2) with the
drift of the step (`Estimate.drift`). Left out: errors are taken as normal and centred, and as alike for all models and
plans of one provenance.

Of memory it counts on which side a run misses. A limit L is exceeded with the chance that `chance_above` says, and this
chance is 1 - c where it is above the prediction by the share that `margin_of` says:

    chance = 1 - Phi(ln(L / predicted) / rms)        margin = exp(rms x Phi^-1(c)) - 1,   Phi the normal distribution

`STEP_ERRORS` and `MEMORY_ERRORS` are the only figures; `errors_of` makes an entry from measured runs, and `coverage`
says what share of such runs lies inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist, fmean

from autoplan.cost.table import CALIBRATED, MEASURED, SCALED, SOURCES

COVERAGE = 0.90
COMPUTED = "uncalibrated"  # without a measured profile

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Errors:
    """How far predictions of one provenance were off.

    Attributes:
        rms: of ln(measured / predicted).
        n_runs: how many runs it is of; 0 when it is an assumption.
        source: the file of the runs, or what the assumption rests on.
    """

    rms: float
    n_runs: int
    source: str

    def __str__(self) -> str:
        return f"{self.words}{', ' if self.n_runs else ': '}{self.source}"

    @property
    def words(self) -> str:
        """`90% interval from 7.1% error of 81 runs with measured links`, which all runs of the tables have."""
        basis = f"error of {self.n_runs} runs with measured links" if self.n_runs else "an assumption"
        return f"{COVERAGE:.0%} interval from {self.rms:.1%} {basis}"


# Runs of 2026-11-21 and 22 on 1, 2 and 4 H200 of six machines, 69 of them on the one that their blocks were measured
# on. Those in which the device waits for the host are apart (`is_host_bound`): a host is less steady than a device.
# Steps are of all runs. CUDA graphs are apart, too: what runs as one would else wait for its host, since its kernels
# are short, and the shorter a kernel, the less is known of it. Peaks with a profile are of graphs on three machines: in
# the runs before they were off by less.
# Links and rates were measured (`hw measure`). With a shipped hardware profile alone steps over NVLink were off by
# about as much or less (rms of 16 runs on H100 0.050, of 45 that wait on H100 and H200 0.18, of 27 graphs on four H100
# 0.088; tests/test_intervals.py has the files), so such steps have no errors of their own; over slow links and networks
# none ran so, and reports say what the runs had.
_RESULTS = "benchmarks/results/predictions_h200_six_machines_2026-11-22"
_MEASURED, _COMPUTED = Errors(0.057, 109, f"{_RESULTS}_profile.txt"), Errors(0.071, 81, f"{_RESULTS}_data_sheet.txt")
_WAITING = Errors(0.17, 132, f"{_RESULTS}_profile.txt")  # computed 0.17 in 139 runs: other hosts, other times
_CAPTURED = Errors(0.064, 82, "benchmarks/results/predictions_graphs_three_machines_2026-11-26_profile.txt")
_GRAPHS = "benchmarks/results/predictions_h200_x2_2026-11-25_graphs"
_CAPTURED_SCALED = Errors(0.096, 22, f"{_GRAPHS}_profile.txt")  # of blocks that were measured in a stream
_CAPTURED_COMPUTED = Errors(0.13, 21, f"{_GRAPHS}_measured_rates.txt")
AHEAD, WAITED_FOR, GRAPH = "ahead", "waited for", "CUDA graph"  # what the host is in a step
STEP_ERRORS: Mapping[tuple[str, str], Errors] = {
    (MEASURED, AHEAD): _MEASURED,
    (SCALED, AHEAD): _MEASURED,
    (CALIBRATED, AHEAD): _COMPUTED,
    (COMPUTED, AHEAD): _COMPUTED,
    **{(source, WAITED_FOR): _WAITING for source in (*SOURCES, COMPUTED)},
    (MEASURED, GRAPH): _CAPTURED,
    (SCALED, GRAPH): _CAPTURED_SCALED,
    (CALIBRATED, GRAPH): _CAPTURED_SCALED,
    (COMPUTED, GRAPH): _CAPTURED_COMPUTED,
}
# Computed peaks of later runs were off by less, 0.0092 in 72; the larger errors count for all that was not measured.
_OTHER_BYTES = Errors(0.035, 20, "benchmarks/results/predictions_h100_2026-11-23_data_sheet.txt")
MEMORY_ERRORS: Mapping[str, Errors] = {
    MEASURED: Errors(0.017, 85, _CAPTURED.source),
    SCALED: _OTHER_BYTES,
    CALIBRATED: _OTHER_BYTES,
    COMPUTED: _OTHER_BYTES,
}
HOST_BOUND_SHARE = 0.05


def is_host_bound(launch_s: float, step_s: float) -> bool:
    """Whether waiting for the host is a part of the step that counts."""
    return launch_s > HOST_BOUND_SHARE * step_s


def role_of_host(launch_s: float, step_s: float, *, is_graph: bool) -> str:
    """What the host is in a step; of `STEP_ERRORS`."""
    return GRAPH if is_graph else WAITED_FOR if is_host_bound(launch_s, step_s) else AHEAD


def interval(predicted: float, errors: Errors, *, drift: float = 0.0) -> Interval:
    """Between which values the measured one lies with a chance of `COVERAGE`."""
    rms = math.hypot(errors.rms, drift)
    ratio = math.exp(student_t_quantile(0.5 + COVERAGE / 2, n_degrees=errors.n_runs) * rms)
    return predicted / ratio, predicted * ratio


def chance_above(limit: float, predicted: float, errors: Errors) -> float:
    """With what chance the measured value is above a limit, where errors are normal and their rms is known."""
    return 1.0 - NormalDist(0.0, errors.rms).cdf(math.log(limit / predicted))


def margin_of(confidence: float, errors: Errors) -> float:
    """By what share a limit is above a prediction where the measured value is below it with this chance.

    The inverse of `chance_above`; 0 for `confidence` 0.5, since errors are centred.
    """
    return math.exp(NormalDist(0.0, errors.rms).inv_cdf(confidence)) - 1.0


def memory_margin(sources: Iterable[str], *, confidence: float) -> float:
    """`margin_of` a peak of memory whose segments were found so."""
    return margin_of(confidence, MEMORY_ERRORS[least_known(sources)])


def least_known(sources: Iterable[str]) -> str:
    """The way that is known least in which any segment was found; `COMPUTED` without a measured profile."""
    return max(sources, key=SOURCES.index, default=COMPUTED)


def student_t_quantile(probability: float, *, n_degrees: int) -> float:
    """Quantile of Student's t distribution; of the normal one when `n_degrees` is 0, for a spread that is given.

        t = z + (z^3 + z) / (4 n) + (5 z^5 + 16 z^3 + 3 z) / (96 n^2) + ...,   z the quantile of the normal distribution

    Source: Abramowitz and Stegun, "Handbook of Mathematical Functions", 1964, 26.7.5. Two terms: 0.95 from n = 5 on is
    right to 0.5 %.
    """
    z = NormalDist().inv_cdf(probability)
    if n_degrees == 0:
        return z
    return z + (z**3 + z) / (4 * n_degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n_degrees**2)


def errors_of(pairs: Iterable[tuple[float, float]], *, source: str) -> Errors:
    """The errors of (predicted, measured) pairs, as an entry of the tables above."""
    squares = [math.log(measured / predicted) ** 2 for predicted, measured in pairs]
    return Errors(math.sqrt(fmean(squares)), len(squares), source)


def coverage(cases: Iterable[tuple[Interval, float]]) -> float | None:
    """The share of (interval, measured) cases in which the measured value lies inside; None without any."""
    inside = [is_inside(measured, bounds) for bounds, measured in cases]
    return sum(inside) / len(inside) if inside else None


def is_inside(measured: float, bounds: Interval) -> bool:
    """Whether a measured value lies in an interval, its ends included."""
    return bounds[0] <= measured <= bounds[1]
