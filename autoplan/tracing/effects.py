"""What a traced forward does besides returning values: it writes buffers.

The functional graph of `torch.export` returns the new contents of each buffer as an extra output. Here they become
ops again, where a reader of the model expects them:

    batch norm                 one `batch_norm`, which updates its running statistics by itself
    any other buffer           `copy_(buffer, new value)`, right after the op that computed the new value
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoplan.graph import Argument, Op, Ref

COPY = "aten.copy_.default"
_NORM_OF_STATISTICS = "aten._native_batch_norm_legit_no_training.default"
_FUNCTIONAL_NORM = "aten._native_batch_norm_legit_functional.default"
_ADD = "aten.add.Tensor"
_RUNNING = (3, 4)  # mean and variance, among its operands as among its results


def restore_effects(ops: tuple[Op, ...], *, written: Mapping[str, str]) -> tuple[Op, ...]:
    """The ops with their effects as ops; `written` maps the value that a buffer takes to the buffer's name."""
    norms = {op.name for op in ops if op.target in (_FUNCTIONAL_NORM, _NORM_OF_STATISTICS)}
    statistics = _computed_only_from(ops, norms)
    renamed = {
        op.name: op.args[0].name for op in ops if op.target == "getitem" and op.args[0].name in norms and not op.args[1]
    }
    renamed |= _buffers_of(ops, statistics)
    counts = _counts(ops, written)
    written = {**written, **counts}
    found: list[Op] = []
    for op in ops:
        if op.name in renamed or op.name in statistics:
            continue
        names = {**renamed, **counts} if op.name in written else renamed
        op = replace(op, args=_with_names(op.args, names), kwargs=_with_names(op.kwargs, renamed))
        found.append(_batch_norm(op) if op.name in norms else op)
        if op.name in written:
            buffer = written[op.name]
            write = replace(op, name=f"write_{op.name}", target=COPY, args=(Ref(buffer), Ref(op.name)), kwargs=())
            found.append(write)
    return tuple(found)


def _computed_only_from(ops: tuple[Op, ...], norms: set[str]) -> set[str]:
    """Statistics that batch norms return, and casts of them."""
    found: set[str] = set()
    for op in ops:
        is_statistic = op.target == "getitem" and op.args[0].name in norms and op.args[1] > 0
        is_cast = op.target == "aten._to_copy.default" and op.args[0].name in found
        if is_statistic or is_cast:
            found.add(op.name)
    return found


def _buffers_of(ops: tuple[Op, ...], statistics: set[str]) -> dict[str, str]:
    """The buffers that the statistics are written into: a batch norm that is called again reads those."""
    table, found = {op.name: op for op in ops}, dict[str, str]()
    for op in ops:
        if op.name in statistics:
            source = op.args[0].name
            if op.target != "getitem":
                found |= {op.name: found[source]} if source in found else {}
            elif table[source].target == _FUNCTIONAL_NORM and op.args[1] in _RUNNING:
                read = table[source].args[op.args[1]].name
                found[op.name] = found.get(read, read)
    return found


def _counts(ops: tuple[Op, ...], written: Mapping[str, str]) -> dict[str, str]:
    """What a buffer holds between the calls of a module that adds a number to it in each: value -> buffer."""
    table, found = {op.name: op for op in ops}, dict[str, str]()
    for name, buffer in written.items():
        chain, op = list[str](), table.get(name)
        while op is not None and op.target == _ADD and isinstance(op.args[0], Ref):
            before = op.args[0].name
            if before == buffer:
                found |= dict.fromkeys(chain, buffer)
                break
            chain.append(before)
            earlier = table.get(before)
            op = earlier if earlier is not None and earlier.module_path == op.module_path else None
    return found


def _batch_norm(op: Op) -> Op:
    """One in training, or in evaluation mode, where it normalizes by the running statistics."""
    args = op.args if op.target == _FUNCTIONAL_NORM else (*op.args[:5], False, *op.args[5:])
    return replace(op, target="aten.batch_norm.default", args=(*args, True), outputs=op.outputs[:1])


def _with_names(argument: Argument, names: Mapping[str, str]) -> Argument:
    if isinstance(argument, Ref):
        return Ref(names.get(argument.name, argument.name))
    if isinstance(argument, tuple):
        return tuple(_with_names(item, names) for item in argument)
    return argument
