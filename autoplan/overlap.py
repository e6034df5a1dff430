"""Overlap: what compute and communication take longer while both run on a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overlap:
    """C seconds of compute and G of communication that begin together take max(T1, T2):

        T1 = C + beta G     compute takes longer            beta   `communication_exposed`
        T2 = G + gamma C    communication takes longer      gamma  `compute_exposed`

    Both are from 0 to below 1: no more than one after the other. While both run, compute takes 1 + beta r and
    communication 1 + gamma / r times as long as alone, with

        r = (1 - gamma) / (1 - beta)    seconds of communication that a second of compute hides (`hidden_per_compute`)

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
