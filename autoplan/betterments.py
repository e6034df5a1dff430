"""What a little better cluster is worth: a row of what `questions.sensitivity` finds and reports show."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SensitivityRow:
    """What one betterment of the cluster is worth.

    Attributes:
        step_s: of the best plan then; None when there was no time left to look for it.
        gain: share of what is minimized (the step time, or step time x devices) that it saves.
        plan_changes: how that plan differs from the chosen one.
    """

    change: str
    step_s: float | None
    gain: float | None
    plan_changes: str
