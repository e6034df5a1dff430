"""What kind of knowledge a figure rests on, told from the words of its source.

measured      timed on such a device or link
calibrated    fitted to measurements
data sheet    published by who makes or sells it, or by who wrote it down
assumed       taken over from another device, or set by hand
computed      follows from the others
"""

from __future__ import annotations

import re

from autoplan.cost.table import CALIBRATED, MEASURED, SCALED

KINDS = ("measured", "calibrated", "data sheet", "assumed", "computed")
MEANINGS = {
    "measured": "timed on such a device or link",
    "calibrated": "fitted to measurements",
    "data sheet": "published",
    "assumed": "taken over from another device, or set by hand",
    "computed": "follows from other figures",
}
# The first that is found decides: "assumed: as measured on 2 H200" is an assumption.
_WORDS = (
    ("assumed", re.compile(r"^(?:assum|as on |as [A-Z])|not measured|by hand|guess", re.IGNORECASE)),
    ("calibrated", re.compile(r"\bfit(?:ted)?\b|\bcalibrat", re.IGNORECASE)),
    ("computed", re.compile(r"by definition|computed", re.IGNORECASE)),
    (
        "measured",
        re.compile(
            r"\bmeasured|\bsweep|nccl-tests|nvidia-smi|driver total|\btorch \d|\bNCCL\b"
            r"|healthy|-finder\b|median of \d+ shapes"
        ),
    ),
)
_TRUST = {MEASURED: "measured", SCALED: "measured", CALIBRATED: "calibrated"}


def provenance_kind(source: str) -> str:
    """One of `KINDS`; a source that says nothing else was published."""
    return next((kind for kind, words in _WORDS if words.search(source)), "data sheet")


def trust_kind(trust: str) -> str:
    """One of `KINDS` for a prediction, by what `answers.answer.trust` says of its times."""
    return _TRUST.get(trust, "computed")
