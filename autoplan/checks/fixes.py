"""Checks of what a user fixes against the model: that it has what the choice is about."""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.analysis.chunked_loss import why_whole
from autoplan.analysis.semantics import OWN_GRADIENTS_FIX, check_batch_norm, check_loss_average, own_gradients
from autoplan.analysis.uncompiled import why_uncompiled
from autoplan.errors import UsageError
from autoplan.graph import FAILS_SHARDED, OPTIMIZER_WORDS, WRITES_BATCH, OpGraph
from autoplan.options import Options


def check_fixed(graph: OpGraph, options: Options) -> None:
    """Return when the model can have all that is fixed.

    Raises: UsageError.
    """
    fix = dict(options.fix)
    check_loss_average(graph, fix.get("loss_average"), error=UsageError)
    check_batch_norm(graph, fix.get("batch_norm"))
    _check_own_gradients(graph, fix)
    _check_replaced_weights(graph, fix)
    _check_sharded_update(graph, fix)
    _check_compile(graph, fix.get("compile"))
    _check_recompute(graph, fix.get("recompute"))
    _check_loss(graph, fix.get("loss"))


def _check_own_gradients(graph: OpGraph, fix: Mapping[str, str]) -> None:
    """Refuse what replaces the user's classes by code generated from the graph, where that lacks their gradients."""
    generated = {name: fix[name] for name in ("tp", "pp") if fix.get(name, "1") != "1"}
    generated |= {"generated": "on"} if fix.get("generated") == "on" else {}
    for name, value in generated.items() if graph.has_own_gradients else ():
        raise UsageError.of(
            f"--fix {name}={value}",
            found=f"{own_gradients(graph)}, which code generated from the traced graph would not have",
            expected="tp=1 and pp=1, where the user's own classes run",
            fix=f"leave {name} out, or {OWN_GRADIENTS_FIX}",
        )


def _check_replaced_weights(graph: OpGraph, fix: Mapping[str, str]) -> None:
    """Refuse the user's own classes where these run with other weights than their own."""
    if fix.get("generated") == "off" and graph.replaces_weights and not graph.is_module_level:
        raise UsageError.of(
            "--fix generated=off",
            found="torch.func.functional_call in forward, whose weights ZeRO 3 and recomputation would replace",
            expected="generated code, which has them as values",
            fix="leave generated out, or use --module-level, which recomputes nothing of such a model",
        )


def _check_sharded_update(graph: OpGraph, fix: Mapping[str, str]) -> None:
    """Refuse ZeRO where the optimizer would fail in its first step."""
    asked = [f"{name}={fix[name]}" for name, none in (("zero", "0"), ("shard", "1")) if fix.get(name, none) != none]
    if asked and FAILS_SHARDED in graph.dissolved:
        raise UsageError.of(
            f"--fix {','.join(asked)}",
            found="an optimizer of build_optimizer that fails on the distributed tensors that ZeRO 1 to 3 give it, or"
            " takes numbers of them (.item()) that differ between ranks",
            expected="zero=0, where it gets whole tensors",
            fix=f"leave {' and '.join(asked)} out, or use another optimizer (AdamW has all it needs)",
        )


def _check_compile(graph: OpGraph, compiles: str | None) -> None:
    """Refuse to compile what torch compiles wrongly."""
    if compiles == "on":
        _refuse(
            "--fix compile=on",
            why_uncompiled(graph),
            expected="compiled code with the gradients that the model has as it is",
            fix="leave compile out, or change the buffer after the step, outside of forward",
        )


def _check_loss(graph: OpGraph, loss: str | None) -> None:
    """Refuse to chunk a loss that is no pattern the runtime knows."""
    if loss == "chunked":
        _refuse(
            "--fix loss=chunked",
            why_whole(graph),
            expected="a model that ends in an nn.Linear, then F.cross_entropy of its rows",
            fix="leave loss out, or write the end of the model so",
        )


def _refuse(option: str, why: str, *, expected: str, fix: str) -> None:
    """Refuse what is fixed, if there is a reason."""
    if why:
        raise UsageError.of(option, found=why, expected=expected, fix=fix)


def _check_recompute(graph: OpGraph, recompute: str | None) -> None:
    """Refuse to fix what a model without blocks cannot do."""
    if (
        recompute in ("full", "selective")
        and graph.is_module_level
        and set(graph.dissolved) - {WRITES_BATCH, *OPTIMIZER_WORDS}
    ):
        raise UsageError.of(
            f"--fix recompute={recompute}",
            found="a forward that freezes parameters or calls modules by torch.func.functional_call",
            expected="modules that run alike when they are recomputed",
            fix="leave recompute out, or write this without either",
        )
    if recompute in ("full", "selective") and not any(segment.is_block for segment in graph.segments):
        raise UsageError.of(
            f"--fix recompute={recompute}",
            found="no block",
            expected="a model with blocks (modules in a ModuleList or Sequential), which are recomputed one by one",
            fix="put the layers into an nn.ModuleList, or leave recompute out",
        )
