"""The mesh drawn: a row per pipeline rank, a box per data-parallel rank, a cell per tensor-parallel rank.

    rank = (pp_index * dp + dp_index) * tp + tp_index

Of a long axis the first and the last places are drawn, and what is left out is written between them.
"""

from __future__ import annotations

from autoplan.html_report.svg import Chart, element, label, title
from autoplan.parallel_plan import Mesh

WIDTH = 960
LEFT, TOP, GAP = 76, 24, 6
ROW_HEIGHT = 30
MAX_ROWS, MAX_BOXES, MAX_CELLS = 10, 16, 16
MAX_BOX_WIDTH = 150
MIN_NUMBER_WIDTH = 7  # of a cell, per digit of its rank


def mesh_chart(mesh: Mesh, *, n_devices_per_host: int | None) -> Chart:
    """Which rank does what; `n_devices_per_host` is None where hosts differ, then no host is named."""
    rows, boxes, cells = (
        shown(size, n_most) for size, n_most in ((mesh.pp, MAX_ROWS), (mesh.dp, MAX_BOXES), (mesh.tp, MAX_CELLS))
    )
    box_width = min(MAX_BOX_WIDTH, (WIDTH - LEFT - GAP * len(boxes)) / len(boxes))
    parts = [label(LEFT, 14, _axes_text(mesh), css="soft")]
    for row, pp_index in enumerate(rows):
        y = TOP + (ROW_HEIGHT + GAP) * row
        if pp_index is None:
            parts.append(label(LEFT, y + 19, f"{mesh.pp - len(rows) + 1} more pipeline ranks", css="soft"))
            continue
        parts.append(label(LEFT - 8, y + 19, f"pp {pp_index}", css="end"))
        for place, dp_index in enumerate(boxes):
            x = LEFT + (box_width + GAP) * place
            if dp_index is None:
                parts.append(label(x + box_width / 2, y + 19, f"… {mesh.dp - len(boxes) + 1}", css="middle soft"))
                continue
            for column, tp_index in enumerate(cells):
                width = box_width / len(cells)
                cell = (x + width * column, y, width)
                parts.append(_cell(mesh, (pp_index, dp_index, tp_index), cell, n_devices_per_host))
            parts.append(element("rect", css="frame", x=x, y=y, width=box_width, height=ROW_HEIGHT))
    return Chart(
        name="mesh",
        title="The mesh",
        summary=f"{mesh.n_devices} devices: pipeline {mesh.pp} x data {mesh.dp} x tensor {mesh.tp}.",
        width=WIDTH,
        height=TOP + (ROW_HEIGHT + GAP) * len(rows),
        body="".join(parts),
    )


def shown(size: int, n_most: int) -> tuple[int | None, ...]:
    """The places of an axis to draw; None stands for those left out, the last one is always there."""
    return tuple(range(size)) if size <= n_most else (*range(n_most - 2), None, size - 1)


def _axes_text(mesh: Mesh) -> str:
    down = f"{mesh.pp} down: pipeline" if mesh.pp > 1 else "one stage"
    across = f"{mesh.dp} across: data parallel"
    within = f"{mesh.tp} in a box: tensor parallel" if mesh.tp > 1 else "one device a box"
    return f"{down}; {across}; {within}. Numbers are ranks."


def _cell(
    mesh: Mesh, place: tuple[int, int, int | None], cell: tuple[float, float, float], n_per_host: int | None
) -> str:
    pp_index, dp_index, tp_index = place
    x, y, width = cell
    if tp_index is None:
        return label(x + width / 2, y + 19, "…", css="middle")
    rank = (pp_index * mesh.dp + dp_index) * mesh.tp + tp_index
    pipeline = f"pipeline rank {pp_index}, " if mesh.pp > 1 else ""
    told = f"rank {rank}: {pipeline}data {dp_index}, tensor {tp_index}"
    if n_per_host is not None:
        told += f", host {rank // n_per_host}"
    series = _ROW_SERIES[pp_index % len(_ROW_SERIES)]
    box = {"x": x, "y": y, "width": width, "height": ROW_HEIGHT}
    drawn = element("rect", title(told), css=f"f{series} outline", **box)
    if width >= MIN_NUMBER_WIDTH * len(str(rank)) + 4:
        drawn += label(x + width / 2, y + 19, str(rank), css=f"t{series} middle small")
    return drawn


_ROW_SERIES = (0, 6, 4, 7)  # neighbouring stages differ
