"""Rows as CSV and JSON, and the schema of that JSON."""

from __future__ import annotations

import csv
import types
import typing
from collections.abc import Sequence
from dataclasses import asdict, fields
from io import StringIO
from typing import Any

from autoplan.parallel_plan import SCHEMA_VERSION
from autoplan.what_if.asking import WhatIf
from autoplan.what_if.report_text import assumption_texts
from autoplan.what_if.rows import SHARES, WhatIfRow

_OF_WHOLE_HOSTS = "; of whole hosts: of devices that the plan leaves idle and of spare hosts too"
_OF_THE_STEP = "from the errors of earlier runs, with 90 % confidence"
MEANINGS = {
    "hardware": "name or file of the hardware profile, or of the mixed cluster",
    "n_hosts": "hosts of the cluster, without spare ones",
    "n_devices": "devices of these hosts",
    "global_batch": "samples per optimizer step",
    "status": "of the search: optimal or feasible where there is a plan; infeasible, unknown, interrupted, or unusable"
    " where the cluster cannot train the model as asked",
    "precision": "what the model computes in",
    "overrides": "arguments of build_model, as name=value",
    "network_scale": "factor on the bandwidth between hosts",
    "host_link": "kind of link inside a host in place of its own; null keeps that",
    "n_nics": "network ports of each host in place of its own; null keeps these",
    "condition": "which of several money, reliability or loading values the row is made with; null where there is one",
    "device": "name of the devices",
    "detail": "why there is no plan; null where there is one",
    "gap": "share of the step that a better plan of the space searched might save",
    "plan": "the plan in words",
    "fix": "what --fix takes to get this plan",
    "n_idle_devices": "devices that the plan leaves idle",
    "step_s": "seconds of one optimizer step, without stragglers, loading, checkpoints and failures",
    "step_s_interval": f"between which two the step is expected, {_OF_THE_STEP}",
    "samples_per_s": "global_batch / step_s; what is left on the wall is this times goodput",
    "tokens_per_s": "likewise tokens; null where the model reads none",
    "mfu": "model FLOPs / (step_s x peak rate of the devices that the plan uses)",
    "peak_bytes": "memory needed by the pipeline rank with the least left",
    "memory_limit_bytes": "memory of its devices",
    "chance_short_of_memory": "with what chance that memory falls short, by the errors of earlier peaks",
    "step_wall_s": "seconds of a step with stragglers and loading of data",
    "goodput": "share of wall time in which steps of step_s run, without stragglers, loading, checkpoints, failures",
    "mtbf_s": "mean seconds between failures of the whole cluster",
    "checkpoint_s": "seconds that training stands still for one checkpoint",
    "checkpoint_interval_steps": "steps between two checkpoints that lose the least time",
    "shares": "share of wall time by what it is spent on; the shares sum to 1, or there is none",
    "train_s": "wall seconds to train on the tokens or samples asked for",
    "train_s_interval": "the same with the step at either end of its interval",
    "device_hours": f"train_s in hours x devices{_OF_WHOLE_HOSTS}",
    "usd_per_device_hour": "price of an hour of one device",
    "price_source": "where that price comes from",
    "price_date": "when the offers between which it lies were read, YYYY-MM-DD; null where that is not known",
    "cost_usd": f"device_hours x usd_per_device_hour{_OF_WHOLE_HOSTS}",
    "cost_usd_interval": f"the same at the cheapest and at the dearest offer{_OF_WHOLE_HOSTS}",
    "usd_per_billion_tokens": f"cost_usd / billions of tokens{_OF_WHOLE_HOSTS}",
    "own_cost_usd": f"the same run on hardware of one's own, energy included{_OF_WHOLE_HOSTS}",
    "break_even_utilisation": "share of hours in use above which owning is cheaper; null where it never is",
    "power_kw": "of the cluster and its spare hosts while it trains, by the power of the boards, load and PUE",
    "energy_kwh": "power_kw x train_s in hours",
    "warnings": "sentences",
}


def row_to_dict(row: WhatIfRow) -> dict[str, Any]:
    """A row as JSON values; shares as an object."""
    return {**asdict(row), "shares": dict(row.shares)}


def whatif_to_dict(answer: WhatIf) -> dict[str, Any]:
    """The answer as JSON values; `whatif_schema` says which."""
    sweep = answer.sweep
    return {
        "schema_version": SCHEMA_VERSION,
        "rows": [row_to_dict(row) for row in answer.rows],
        "is_interrupted": sweep.is_interrupted,
        "n_known_before": sweep.n_kept,
        "processor_s": sweep.processor_s,
        "wall_s": sweep.wall_s,
        "assumptions": list(assumption_texts(answer.assumptions)),
    }


def whatif_csv(rows: Sequence[WhatIfRow]) -> str:
    """One line per row: plain fields, intervals as `_low` and `_high`, and a column per share of wall time."""
    out = StringIO()
    names = [field.name for field in fields(WhatIfRow) if field.name != "shares"]
    header = [f"{name}{end}" for name in names for end in _ends(name)]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*header, *(f"share_{name}" for name in SHARES)])
    for row in rows:
        shares = dict(row.shares)
        cells = [cell for name in names for cell in _csv_cells(name, getattr(row, name))]
        writer.writerow([*cells, *(shares.get(name, "") for name in SHARES)])
    return out.getvalue()


def _ends(name: str) -> tuple[str, ...]:
    return ("_low", "_high") if name.endswith("_interval") else ("",)


def _csv_cells(name: str, value: Any) -> list[Any]:
    if name.endswith("_interval"):
        return ["", ""] if value is None else list(value)
    return ["; ".join(value) if isinstance(value, tuple) else "" if value is None else value]


def whatif_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of `autoplan whatif --format json`."""
    hints = typing.get_type_hints(WhatIfRow)
    row = {name: {"description": MEANINGS[name], **_schema(hint)} for name, hint in hints.items()}
    row["shares"] = {
        "type": "object",
        "description": MEANINGS["shares"],
        "properties": {name: {"type": "number"} for name in SHARES},
        "additionalProperties": False,
    }
    properties = {
        "schema_version": {"const": SCHEMA_VERSION},
        "rows": {"type": "array", "items": _object(row)},
        "is_interrupted": {"description": "some points were not searched", "type": "boolean"},
        "n_known_before": {"description": "points that earlier searches had found", "type": "integer"},
        "processor_s": {"description": "processor seconds of all searches", "type": "number"},
        "wall_s": {"description": "seconds that they took", "type": "number"},
        "assumptions": {"description": "sentences", "type": "array", "items": {"type": "string"}},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "autoplan whatif",
        **_object(properties),
    }


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean"}


def _schema(hint: Any) -> dict[str, Any]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return {"anyOf": [_schema(item) for item in typing.get_args(hint)]}
    if hint is type(None):
        return {"type": "null"}
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        if items[-1] is Ellipsis:
            return {"type": "array", "items": _schema(items[0])}
        return {"type": "array", "prefixItems": [_schema(item) for item in items], "minItems": len(items)}
    return {"type": _NAMES[hint]}
