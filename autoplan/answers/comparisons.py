"""An answer beside another one: values of what `planning.questions` finds and reports show."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.answers.answer import Answer
from autoplan.search.result import Candidate

Fix = tuple[tuple[str, str], ...]  # (name, value) of --fix


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


@dataclass(frozen=True, slots=True)
class WhyNot:
    """A plan that was not chosen, beside the one that was.

    Attributes:
        instead: the answer of a search for the best plan that has `fix`; perhaps without a plan.
        notes: what it changes in the meaning of the model and the chosen one does not.
        left_out: what the chosen one changes and it does not.
    """

    fix: Fix
    chosen: Candidate
    instead: Answer
    notes: tuple[str, ...]
    left_out: tuple[str, ...]
