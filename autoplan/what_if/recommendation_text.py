"""A recommendation as text and as JSON values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autoplan.parallel_plan import SCHEMA_VERSION
from autoplan.plain_text import WIDTH, count, folded, text_table
from autoplan.units import format_seconds, format_usd
from autoplan.what_if.answer_changes import TOLERANCE, cluster_name, swing_cells
from autoplan.what_if.recommending import Recommendation
from autoplan.what_if.row_tables import row_to_dict
from autoplan.what_if.row_text import bullets, price_text, whatif_table
from autoplan.what_if.rows import WhatIfRow


def recommendation_text(answer: Recommendation, *, width: int = WIDTH) -> str:
    """One sentence, the alternatives, what would change it, and what it rests on."""
    said = (_sentence(answer), _much_cheaper(answer))
    parts = ["\n".join(folded(text, width=width) for text in said if text)]
    shown: list[WhatIfRow] = []
    for row in (answer.best, answer.nearest, *answer.alternatives, answer.much_cheaper, answer.passed_over):
        if row is not None and row not in shown:
            shown.append(row)
    if shown:
        parts.append(whatif_table(shown, width=width).rstrip())
    tornado = swings_table(answer, width=width)
    for title, texts in (
        ("What would change it", answer.changes),
        ("Looked at", answer.looked_at if answer.best is None else ()),
        ("It rests on", answer.assumptions),
    ):
        if texts:
            parts.append(f"{title}\n{bullets(texts, width=width)}")
        if title == "What would change it" and tornado:
            parts.append(tornado)
    return "\n\n".join(parts) + "\n"


def swings_table(answer: Recommendation, *, width: int = WIDTH) -> str:
    """The tornado; empty without any swing."""
    if answer.best is None or not answer.swings:
        return ""
    what = "cost" if answer.limit.deadline_s is not None else "time"
    header = (f"{what} with one assumption at its", "low end", "high end", "best then")
    cells = [swing_cells(swing, answer.best, answer.limit) for swing in answer.swings]
    return text_table(header, cells, right=frozenset({1, 2}), width=width).rstrip()


def _sentence(answer: Recommendation) -> str:
    looked = f"{count(answer.n_looked_at, 'cluster')} looked at"
    row = answer.best or answer.nearest
    if answer.is_beyond_peak_rates:
        hosts = f"at most {count(answer.max_hosts, 'host')}"
        return f"No cluster of {hosts} trains it {answer.wanted}: too slow even at the peak rate of its devices."
    if row is None:
        return f"Nothing that was looked at trains it {answer.wanted}, nor at all ({looked})."
    assert row.train_s is not None and row.cost_usd is not None
    figures = f"{format_seconds(row.train_s)}, {format_usd(row.cost_usd)} at {price_text(row)}"
    if answer.best is None:
        return (
            f"None found: no plan found trains it {answer.wanted} ({looked}). Nearest: {cluster_name(row)}: {figures}."
        )
    verb = "Rent" if answer.wanted.startswith("within") else "Take"
    taken = f"{verb} {cluster_name(row)}: it trains the model {answer.wanted}: {figures}; {looked}."
    return f"{taken} {_passed_over(answer.passed_over, row)}" if answer.passed_over is not None else taken


def _much_cheaper(answer: Recommendation) -> str:
    """Which much cheaper cluster may be as fast."""
    best, row = answer.best, answer.much_cheaper
    if best is None or row is None or best.train_s_interval is None:
        return ""
    assert row.train_s is not None and row.cost_usd is not None
    low, high = map(format_seconds, best.train_s_interval)
    figures = f"{format_seconds(row.train_s)}, {format_usd(row.cost_usd)}"
    return f"{cluster_name(row)} may be as fast, by the interval ({low} to {high}): {figures}."


def _passed_over(fastest: WhatIfRow, best: WhatIfRow) -> str:
    """Why the answer is not the fastest."""
    assert fastest.train_s is not None and fastest.cost_usd is not None
    assert best.train_s is not None and best.cost_usd is not None
    return (
        f"The fastest, {cluster_name(fastest)}, takes {1.0 - fastest.train_s / best.train_s:.1%} less time and costs "
        f"{format_usd(fastest.cost_usd)}; of those at most {TOLERANCE:.0%} slower the cheapest is taken."
    )


def recommendation_to_dict(answer: Recommendation) -> dict[str, Any]:
    """The answer as JSON values; rows are those of `whatif_schema`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "wanted": answer.wanted,
        "status": "feasible" if answer.best is not None else "none_found",
        "best": None if answer.best is None else row_to_dict(answer.best),
        "passed_over": None if answer.passed_over is None else row_to_dict(answer.passed_over),
        "much_cheaper": None if answer.much_cheaper is None else row_to_dict(answer.much_cheaper),
        "alternatives": [row_to_dict(row) for row in answer.alternatives],
        "nearest": None if answer.nearest is None else row_to_dict(answer.nearest),
        "n_looked_at": answer.n_looked_at,
        "looked_at": list(answer.looked_at),
        "changes": list(answer.changes),
        "swings_are_of": "cost_usd" if answer.limit.deadline_s is not None else "train_s",
        "swings": [asdict(swing) for swing in answer.swings],
        "assumptions": list(answer.assumptions),
        "is_interrupted": answer.is_interrupted,
    }
