"""Overlap: what compute and communication take longer while both run on a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overlap:
    """C seconds of compute and G of communication that begin together take max(T1, T2):

        T1 = C + beta G     compute takes longer            beta   `communication_exposed`
        T2 = G + gamma C    communication takes longer      gamma  `compute_exposed`

    Both are from 0 to below 1: no more than one after the other. The same as rates, while both run compute takes
    c (`compute_slowdown`) and communication m times as long as alone:

        beta = m (1 - 1/c),  gamma = c (1 - 1/m)    <=>    c = (1 - beta gamma) / (1 - beta) = 1 + beta r
                                                           m = (1 - beta gamma) / (1 - gamma) = 1 + gamma / r

    with r = c / m = (1 - gamma) / (1 - beta), the seconds of communication that a second of compute hides. Where beta
    and gamma are equal, c = m = 1 + beta.

    Attributes:
        communication_exposed: share of the time of communication that is added to compute which takes longer.
        compute_exposed: share of the time of compute that is added to communication which takes longer.
    """

    communication_exposed: float
    compute_exposed: float

    @property
    def hidden_per_compute(self) -> float:
        """Seconds of communication that are done beside one second of compute."""
        return (1.0 - self.compute_exposed) / (1.0 - self.communication_exposed)

    @property
    def compute_slowdown(self) -> float:
        """Factor on the time of compute while communication runs."""
        return 1.0 + self.communication_exposed * self.hidden_per_compute

    @property
    def communication_slowdown(self) -> float:
        """Factor on the time of communication while compute runs."""
        return 1.0 + self.compute_exposed / self.hidden_per_compute
