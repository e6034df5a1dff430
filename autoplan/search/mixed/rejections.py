"""Why a mesh over several groups of a mixed cluster is not the answer."""

from __future__ import annotations

import numpy as np

from autoplan.cost.table import CostTable
from autoplan.parallel_plan import Mesh
from autoplan.search.mixed.meshes import Family, Groups
from autoplan.search.rejections import with_margin
from autoplan.search.result import Rejection
from autoplan.solver.linear_model import INFINITY
from autoplan.units import GiB


def least_short(own: Family) -> Rejection | None:
    """Of the meshes that are too large altogether, the one that lacks the least memory."""
    short_bytes = np.where(own.short_bytes > 0.0, own.short_bytes, INFINITY)
    row = int(short_bytes.argmin())
    if short_bytes[row] == INFINITY:
        return None
    mesh, groups = own.member(row)
    detail = f"{_where(mesh, groups)}: {short_bytes[row] / GiB:.1f} GiB short at least, on average"
    return Rejection(mesh, "memory", detail, short_bytes=int(short_bytes[row]))


def _where(mesh: Mesh, groups: Groups) -> str:
    counts = [share.dp for share in mesh.shares] or [own.n_ranks for own in groups]
    kind = "data-parallel ranks" if mesh.shares else "ranks"
    return f"{' + '.join(map(str, counts))} {kind} on groups {' + '.join(str(own.group) for own in groups)}"


def rejection(table: CostTable, groups: Groups, *, bound_s: float) -> Rejection:
    """Of a mesh without a plan that fits and is faster than `bound_s`."""
    where = _where(table.mesh, groups)
    if bound_s == INFINITY:
        detail = f"{where}: some stage needs more{with_margin(table)} than its device has"
        return Rejection(table.mesh, "memory", detail, short_bytes=1)
    return Rejection(table.mesh, "bound", f"{where}: no plan of it is faster than {bound_s:.6g} s")
