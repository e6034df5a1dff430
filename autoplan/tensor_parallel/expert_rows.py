"""Rows that are sorted by expert: which value says where the rows of each expert end, and how they are put back.

    rows: [t, k], weight: [experts, k, n], ends: [experts]          grouped_mm(rows, weight, ends): [t, n]

A rank that has some of the experts needs only their rows, of every value with t rows (layout E). Models usually pick
rows before they count them; `with_ends_first` turns that round, so that a rank knows which ones are its own. At last
the rows are put back in the order of the tokens, and those of a token are summed. A rank does both at once, for its
own rows:

    x[index].reshape(tokens, n, k).sum(1)     x: E  ->  D, D  ->  P
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autoplan.graph import Extent, Op, TensorSpec
from autoplan.layout import D, E, P, R, can_shard, sharded
from autoplan.rules import Strategy, operand_names

GROUPED_PRODUCT = "aten._grouped_mm.default"
OWN_ROWS_SUM = "own_rows_sum"
_VIEWS = frozenset({"aten.view.default", "aten.reshape.default"})


def is_product_by_rows(specs: tuple[TensorSpec, ...]) -> bool:
    """Whether groups of rows are multiplied, each by a matrix of its own; there are other forms of the operator."""
    return len(specs) == 3 and len(specs[1].shape) == 3


def ends_of_rows(ops: tuple[Op, ...], specs: Mapping[str, TensorSpec], degree: int) -> dict[Extent, str]:
    """Number of rows -> the value that divides them among the experts, where all grouped products of `ops` agree.

    Every one of `degree` ranks must have equally many experts: rows of those left over would be no rank's.
    """
    found: dict[Extent, set[str]] = {}
    for op in ops:
        names = operand_names(op)
        if op.target == GROUPED_PRODUCT and is_product_by_rows(tuple(specs[name] for name in names)):
            found.setdefault(specs[names[0]].shape[0], set()).add(names[2])
    agreed = {n_rows: next(iter(ends)) for n_rows, ends in found.items() if len(ends) == 1}
    return {n_rows: ends for n_rows, ends in agreed.items() if can_shard(specs[ends], sharded(0), degree)}


def may_be_divided(op: Op) -> bool:
    """Whether a rank may do only its own rows of an op.

    Not where elements are dropped: what is whole on all ranks must be dropped alike afterwards, so until then they must
    have drawn equally many random numbers.
    """
    return "dropout" not in op.target or not op.args[1]


@dataclass(frozen=True, slots=True)
class PutBack:
    """Three ops that put rows back and sum those of a token; `index` and `view` are read by nothing else."""

    index: Op
    view: Op
    sum: Op

    def strategies(self) -> dict[Op, Strategy]:
        """How a rank does them for its own rows."""
        return {
            self.index: Strategy((E, R), D, is_split=True),
            self.view: Strategy((D,), D, is_split=True),
            self.sum: Strategy((D,), P, is_split=True, function=OWN_ROWS_SUM),
        }


def rows_put_back(ops: tuple[Op, ...], specs: Mapping[str, TensorSpec], degree: int) -> Iterator[PutBack]:
    """Where rows of experts are put back."""
    ends, makers = ends_of_rows(ops, specs, degree), {op.name: op for op in ops}
    n_readers = Counter(name for op in ops for name in op.input_names())
    for op in ops:
        view = makers.get(operand_names(op)[0]) if op.target == "aten.sum.dim_IntList" else None
        index = makers.get(operand_names(view)[0]) if view is not None and view.target in _VIEWS else None
        if view is None or index is None or index.target != "aten.index.Tensor" or len(operand_names(index)) != 2:
            continue
        (n_rows, *rest), (_, *group) = index.outputs[0].shape, view.outputs[0].shape
        is_by_row = n_rows in ends and len(index.args[1]) == 1 and specs[operand_names(index)[0]] == index.outputs[0]
        sums_groups = (
            rest == group[1:] and op.args[1] == (1,) and op.outputs[0].shape == (view.outputs[0].shape[0], *rest)
        )
        if is_by_row and sums_groups and n_readers[index.name] == n_readers[view.name] == 1:
            yield PutBack(index, view, op)


def with_ends_first(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """The ops, where rows that are multiplied group by group are picked behind all that their ends are made from.

    `ops` are those of one run of a block: what other blocks make stays before them.
    """
    for op in ops:
        place = {other.name: index for index, other in enumerate(ops)}
        rows, _, ends = operand_names(op) if op.target == GROUPED_PRODUCT and len(operand_names(op)) == 3 else ("",) * 3
        if rows not in place or ends not in place:
            continue
        counting = _makers(place[ends], ops, place)
        picking = {i for i in _makers(place[rows], ops, place) - counting if ops[i].target != "getitem"}
        if picking and min(picking) < place[ends]:
            window = range(min(picking), place[ends] + 1)
            ordered = [ops[i] for i in sorted(window, key=lambda i: (i not in counting, i))]
            ops = (*ops[: window.start], *ordered, *ops[window.stop :])
    return ops


def _makers(index: int, ops: tuple[Op, ...], place: Mapping[str, int]) -> set[int]:
    """The numbers of an op and of all that it depends on."""
    found, waiting = {index}, [index]
    while waiting:
        read = {place[name] for name in ops[waiting.pop()].input_names() if name in place} - found
        found |= read
        waiting += read
    return found
