"""Rows as text for a terminal: speeds, totals, losses of wall time, energy and owning, plans, and how to read them.

Each table is a tuple of `Column`s; one that is unknown everywhere is left out, and what it means is said below.
A table that is too wide for the terminal has the name of each point on a line of its own.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoplan.plain_text import WIDTH, count, folded, rate_text, text_table
from autoplan.units import BILLION, MILLION, THOUSAND, GiB, format_seconds, format_share, format_usd
from autoplan.what_if.loss_text import loss_table
from autoplan.what_if.rows import (
    Axis,
    WhatIfRow,
    as_fast,
    fastest,
    may_be_far_off,
    off_by,
    pace,
    point_name,
    rate_unit,
    varying,
)

N_EXPLAINED = 24  # rows whose losses and plans are printed; of more, they are in CSV and JSON
ABSENT = "n/a"
KWH_PER_MWH = 1000
STACKED_INDENT = 4
GAP_NOTE = "gap: share of the step that a better plan might save; shown where it is more than the interval"
Series = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a table, and what their columns compare each with.

    Attributes:
        axes: what sets rows apart beside hardware and hosts.
        is_weak: whether the batch grows with the devices, and is no choice of its own.
        highest: of each series, along which only the size changes, the highest speed of one device.
    """

    rows: tuple[WhatIfRow, ...]
    axes: tuple[Axis, ...]
    is_weak: bool
    highest: Mapping[Series, float]
    fastest: WhatIfRow | None
    as_fast: tuple[WhatIfRow, ...]
    cheapest_usd: float | None

    @classmethod
    def of(cls, rows: Sequence[WhatIfRow]) -> Rows:
        """What these rows have in common."""
        is_weak = _is_weak(rows)
        members: dict[Series, list[WhatIfRow]] = {}
        for row in rows:
            members.setdefault(_series(row, is_weak=is_weak), []).append(row)
        highest = {
            series: max(each for row in found if (each := _pace_of_one(row)) is not None)
            for series, found in members.items()
            if len({row.n_devices for row in found if pace(row) is not None}) > 1
        }
        cheapest = min((row.cost_usd for row in rows if row.cost_usd is not None), default=None)
        axes = tuple(axis for axis in varying(rows) if axis.field not in ("hardware", "n_hosts"))
        return cls(tuple(rows), axes, is_weak, highest, fastest(rows), as_fast(rows), cheapest)


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a row as text; `note` says what it is, `is_kept` that it stands though it is unknown everywhere."""

    name: str
    text: Callable[[WhatIfRow, Rows], str]
    note: str = ""
    is_right: bool = True
    is_kept: bool = False


def whatif_table(rows: Sequence[WhatIfRow], *, width: int = WIDTH) -> str:
    """The rows with the fastest (of equal ones the smallest) and the cheapest marked, their losses and their plans."""
    known = Rows.of(rows)
    parts = [_table(known, _speed_columns(rows), width=width), _batch_text(rows)]
    parts.append(_table(known, TOTALS, width=width) if any(row.train_s is not None for row in rows) else "")
    if len(rows) <= N_EXPLAINED:
        planned = [row for row in rows if row.shares]
        parts.append(loss_table(planned, [_label(row, known) for row in planned], width=width) if planned else "")
        parts.append(_table(known, OWNING, width=width) if any(row.train_s is not None for row in rows) else "")
        parts.append(_plans_text(rows, width=width))
        parts.append(_notes_text(known, width=width))
    parts.append(_prices_text(rows, width=width))
    parts.append(_warnings_text(rows, width=width))
    return "\n\n".join(part for part in parts if part) + "\n"


# ------------------------------------------------------------------------------------------------------------- columns


def _speed_columns(rows: Sequence[WhatIfRow]) -> tuple[Column, ...]:
    unit = rate_unit(rows)
    rate = Column(unit, _pace, f"{unit}: over all of the wall time, with what is lost to failures")
    return (*SPEEDS[:2], rate, *SPEEDS[2:])


def _step(row: WhatIfRow, rows: Rows) -> str:
    return row.status if row.step_s is None else format_seconds(row.step_s)


def _off_by(row: WhatIfRow, rows: Rows) -> str:
    return off_by(row) or ABSENT


def _pace(row: WhatIfRow, rows: Rows) -> str:
    per_s = pace(row)
    return ABSENT if per_s is None else rate_text(per_s)


def _mfu(row: WhatIfRow, rows: Rows) -> str:
    return ABSENT if row.mfu is None else format_share(row.mfu)


def _scaling(row: WhatIfRow, rows: Rows) -> str:
    """Only where a series has several sizes."""
    each, highest = _pace_of_one(row), rows.highest.get(_series(row, is_weak=rows.is_weak))
    return ABSENT if each is None or highest is None else f"{each / highest:.0%}"


def _pace_of_one(row: WhatIfRow) -> float | None:
    """Speed of one device, idle ones counted."""
    per_s = pace(row)
    return None if per_s is None else per_s / row.n_devices


def _series(row: WhatIfRow, *, is_weak: bool) -> Series:
    """All that tells a row from others but its size."""
    return _kind(row) if is_weak else (*_kind(row), row.global_batch)


def _is_weak(rows: Sequence[WhatIfRow]) -> bool:
    """Whether all of a kind have one batch per size, and no two sizes the same one."""
    points = {(_kind(row), row.n_devices, row.global_batch) for row in rows}
    sizes = {(kind, n_devices) for kind, n_devices, _ in points}
    batches = {(kind, batch) for kind, _, batch in points}
    return len(points) == len(sizes) == len(batches)


def _kind(row: WhatIfRow) -> Series:
    model = (row.precision, row.overrides)
    hardware = re.sub(r"/\d+(?=$|\+)", "", row.hardware)  # NAME/4 is four of the devices of NAME
    return (hardware, *model, row.network_scale, row.host_link, row.n_nics, row.condition)


def _memory(row: WhatIfRow, rows: Rows) -> str:
    if row.peak_bytes is None or not row.memory_limit_bytes:
        return ABSENT
    return f"{row.peak_bytes / row.memory_limit_bytes:.0%}"


def _marks(row: WhatIfRow, rows: Rows) -> str:
    """`as fast, 4 idle, gap 72%`."""
    rank = "" if row not in rows.as_fast else "fastest" if row is rows.fastest else "as fast"
    gap = f"gap {row.gap:.0%}" if may_be_far_off(row) else ""
    return ", ".join(filter(None, [rank, f"{row.n_idle_devices} idle" if row.n_idle_devices else "", gap]))


def _cheapest(row: WhatIfRow, rows: Rows) -> str:
    return "cheapest" if row.cost_usd is not None and row.cost_usd == rows.cheapest_usd else ""


def _train(row: WhatIfRow, rows: Rows) -> str:
    return ABSENT if row.train_s is None else format_seconds(row.train_s)


def _device_hours(row: WhatIfRow, rows: Rows) -> str:
    return ABSENT if row.device_hours is None else rate_text(row.device_hours)


def _usd(usd: float | None) -> str:
    return ABSENT if usd is None else format_usd(usd).removesuffix(" USD")


def _offers(row: WhatIfRow, rows: Rows) -> str:
    """`5.12k to 19.4k`."""
    if row.cost_usd_interval is None:
        return ABSENT
    low, high = row.cost_usd_interval
    if low == high:
        return "one price"
    return f"{_short(low)} to {_short(high)}"


def _short(usd: float) -> str:
    """Three digits: `63.8k`, `1.92M`."""
    for unit, factor in (("B", BILLION), ("M", MILLION), ("k", THOUSAND)):
        if usd >= 0.9995 * factor:
            return f"{usd / factor:.3g}{unit}"
    return f"{usd:.3g}"


def _kw(row: WhatIfRow, rows: Rows) -> str:
    return ABSENT if row.power_kw is None else rate_text(row.power_kw)


def _mwh(row: WhatIfRow, rows: Rows) -> str:
    return ABSENT if row.energy_kwh is None else rate_text(row.energy_kwh / KWH_PER_MWH)


def _break_even(row: WhatIfRow, rows: Rows) -> str:
    return ABSENT if row.break_even_utilisation is None else f"{row.break_even_utilisation:.0%}"


SPEEDS = (
    Column("step", _step),
    Column("off by", _off_by, "off by: 90 % interval of the step, from the errors of earlier runs with measured links"),
    Column("MFU", _mfu, "MFU: model FLOPs / (time x peak rate of the devices)"),
    Column(
        "scaling",
        _scaling,
        "scaling: speed of one device, as a share of the highest of any shown cluster of the same hardware",
    ),
    Column("memory", _memory, "memory: of the fullest device, at the peak"),
    Column("", _marks, is_right=False),
)
TOTALS = (
    Column("trains in", _train),
    Column("device-hours", _device_hours, "device-hours: of whole hosts, spare ones too, idle or not"),
    Column("cost USD", lambda row, rows: _usd(row.cost_usd), is_kept=True),
    Column("low to high", _offers, "low to high: the same run at the cheapest and at the dearest offer"),
    Column("", _cheapest, is_right=False),
)
OWNING = (
    Column("USD per 1e9 tokens", lambda row, rows: _usd(row.usd_per_billion_tokens)),
    Column("kW", _kw),
    Column("MWh", _mwh, "kW, MWh: of the whole cluster, and of the whole run"),
    Column("own USD", lambda row, rows: _usd(row.own_cost_usd), "own USD: the same run on hardware of one's own"),
    Column("own above", _break_even, "own above: owning is cheaper when used for more than this share of all hours"),
)


# -------------------------------------------------------------------------------------------------------------- tables


def _table(known: Rows, columns: Sequence[Column], *, width: int) -> str:
    """The columns that say something, the names of points before them, or above each line where both are too wide."""
    shown = [column for column in columns if _says_something(column, known)]
    header = [column.name for column in shown]
    cells = [[column.text(row, known) for column in shown] for row in known.rows]
    labels = [_label(row, known) for row in known.rows]
    right = frozenset(index for index, column in enumerate(shown) if column.is_right)
    whole = text_table(
        ["cluster", *header],
        [[label, *line] for label, line in zip(labels, cells, strict=True)],
        right=frozenset(index + 1 for index in right),
        width=None,
    )
    if max(map(len, whole.splitlines())) <= width:
        return whole
    bare = textwrap.indent(text_table(header, cells, right=right, width=None), " " * STACKED_INDENT)
    head, rule, *lines = bare.splitlines()
    stacked = [text for label, line in zip(labels, lines, strict=True) for text in (label, line)]
    return "\n".join([head, rule, *stacked])


def _says_something(column: Column, known: Rows) -> bool:
    return column.is_kept or any(column.text(row, known) not in ("", ABSENT) for row in known.rows)


def _label(row: WhatIfRow, known: Rows) -> str:
    """` 2 x dgx_a100_x8, bf16`: the cluster, and what else sets it apart."""
    digits = max(len(str(other.n_hosts)) for other in known.rows)
    return ", ".join(filter(None, [f"{row.n_hosts:>{digits}} x {row.hardware}", point_name(row, known.axes)]))


def _plans_text(rows: Sequence[WhatIfRow], *, width: int) -> str:
    """The plan of each point, or why it has none; conditions change no plan."""
    bare = [replace(row, condition=None) for row in rows]
    known = Rows.of(bare)
    lines = [f"{_label(row, known)}: {row.plan or row.detail or row.status}{_idle(row)}{_room(row)}" for row in bare]
    return "\n".join(folded(line, width=width, indent=STACKED_INDENT) for line in dict.fromkeys(lines))


def _idle(row: WhatIfRow) -> str:
    if not row.n_idle_devices:
        return ""
    hosts = f", {count(row.n_idle_hosts, 'whole host')}: fewer hosts do" if row.n_idle_hosts else ""
    return f"; {row.n_idle_devices} of {row.n_devices} devices idle{hosts}"


def _room(row: WhatIfRow) -> str:
    left_bytes = row.memory_headroom_bytes
    return "" if left_bytes is None else f"; {left_bytes / GiB:.1f} GiB left"


def _batch_text(rows: Sequence[WhatIfRow]) -> str:
    batches = {row.global_batch for row in rows}
    return f"global batch: {count(batches.pop(), 'sample')} on every cluster" if len(batches) == 1 else ""


def _notes_text(known: Rows, *, width: int) -> str:
    columns = (*_speed_columns(known.rows), *(TOTALS if any(row.train_s for row in known.rows) else ()))
    columns += OWNING if any(row.train_s for row in known.rows) else ()
    notes = [column.note for column in columns if column.note and _says_something(column, known)]
    notes += [GAP_NOTE] if any(map(may_be_far_off, known.rows)) else []
    return bullets(notes, width=width)


def names_of(rows: Sequence[WhatIfRow], *, among: Sequence[WhatIfRow]) -> tuple[str, ...]:
    """What tables of `among` call these rows, each once; conditions change no plan."""
    known = Rows.of([replace(row, condition=None) for row in among])
    return tuple(dict.fromkeys(_label(replace(row, condition=None), known).strip() for row in rows))


def price_text(row: WhatIfRow) -> str:
    """`2.95 USD per device-hour (offers: 1.99 to 5.00)`; of a row with a cost."""
    assert row.usd_per_device_hour is not None
    text = f"{row.usd_per_device_hour:.2f} USD per device-hour"
    if row.cost_usd_interval is None or not row.device_hours or row.cost_usd_interval[0] == row.cost_usd_interval[1]:
        return text
    low, high = (usd / row.device_hours for usd in row.cost_usd_interval)
    return f"{text} (offers: {low:.2f} to {high:.2f})"


def _prices_text(rows: Sequence[WhatIfRow], *, width: int) -> str:
    priced = [row for row in rows if row.cost_usd is not None]
    texts = [f"price of {row.device}: {price_text(row)}, {row.price_date or 'no date known'}" for row in priced]
    return "\n".join(folded(text, width=width, indent=2) for text in dict.fromkeys(texts))


def _warnings_text(rows: Sequence[WhatIfRow], *, width: int) -> str:
    texts = dict.fromkeys(text for row in rows for text in row.warnings)
    return "\n".join(folded(f"! {text}", width=width, indent=2) for text in texts)


def bullets(texts: Iterable[str], *, width: int = WIDTH) -> str:
    """Sentences as a list."""
    return "\n".join(folded(f"- {text}", width=width, indent=2) for text in texts)
