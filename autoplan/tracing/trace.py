"""Model file -> OpGraph, by `torch.export` on meta tensors: no weight is ever allocated.

The model runs in bfloat16 with two batch sizes, and the two graphs are laid over each other:

    batch 2                         batch 3
    view(x, [2, 256, 6, 64])   +    view(x, [3, 256, 6, 64])   =   view(x, [PerSample(1), 256, 6, 64])
    to(cos, bfloat16)          +    to(cos, bfloat16)          =   to(cos, compute)

The first is exported. The second is recorded while it runs (`second_run`), in a tenth of the time, and exported too
where the record is not the same graph. So the graph is exact for every batch size, and what depends on the batch in
another way is found and refused instead of guessed. Whatever is bfloat16 becomes the compute precision; a forward that
branches on its dtype (T5 does) is planned as it runs in bfloat16. Attention masks that say nothing are left out
(`constant_masks`), and branches on the values of constants are answered (`known_branches`).
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.errors import InputError, TraceError
from autoplan.graph import DTYPE_BYTES, IN_PLACE, OWN_GRADIENTS, REPLACED, WRITES_BATCH, OpGraph
from autoplan.tracing.batches import BATCH_A, BATCH_B, as_given, check_samples, check_written, plain
from autoplan.tracing.dissolved import FREEZING, keep_no_grad, watch_dissolved
from autoplan.tracing.given_values import ValuesAsOperators, with_values
from autoplan.tracing.host_reads import waiting_place
from autoplan.tracing.in_place_writes import writes_across_blocks
from autoplan.tracing.known_branches import Answering, Answers, find_answers, known_buffers
from autoplan.tracing.meta_autocast import autocast_on_meta
from autoplan.tracing.model_source import ModelSource
from autoplan.tracing.operand_dtypes import check_operands
from autoplan.tracing.overlaid_graph import DTYPE, NumbersDiffer, Trace, TracedRun, overlay
from autoplan.tracing.places import calling_place, escaping_place
from autoplan.tracing.refused_writes import refuse_what_autograd_refuses, writes_numbers
from autoplan.tracing.returned_loss import check_returned
from autoplan.tracing.second_run import like_an_export, record_run
from autoplan.tracing.shapes_by_values import shapes_without_values
from autoplan.tracing.sync_batch_norm import batch_norm_of_one_process, synchronizes_batch_norm
from autoplan.tracing.whole_dropout import with_whole_dropout
from autoplan.tracing.written_slices import without_copies
from autoplan.user_errors import (
    USERS_ERRORS,
    lacks_values,
    leaves_the_trace,
    made_batch,
    trace_failure,
)


def trace_model(source: ModelSource) -> OpGraph:
    """The OpGraph of a model, for every batch size and precision.

    Raises: TraceError with the user's file and line when `torch.export` cannot follow the model.
    """
    first = _trace(source, BATCH_A)
    second = _second_run(source, first) or _trace(source, BATCH_B).run
    try:
        graph = overlay(source, first, second)
    except NumbersDiffer as error:
        place = calling_place(error.node, lambda: _run_again(source, BATCH_A, first.answers))
        raise TraceError(f"{source.where}: an operator depends on {error.cause}{place}\n  found: {error}") from error
    with _on_meta():
        waits_at = waiting_place(lambda: call_model(first.model, first.batch[0]))
    return replace(graph, waits_at=waits_at, synchronizes_batch_norm=synchronizes_batch_norm(first.model))


def _second_run(source: ModelSource, first: Trace) -> TracedRun | None:
    """The other batch size as a recorded run; None where only an export can tell what it is."""
    model, batch = _build_model(source), meta_batch(source, BATCH_B)
    answers = _answers(source, BATCH_B) if first.answers else {}
    with _on_meta(), shapes_without_values(), ValuesAsOperators(), Answering(answers):
        graph = record_run(_WithLoss(model, source), batch, like=first)
    return TracedRun(graph, model, batch) if graph is not None else None


# ---------------------------------------------------------------- one trace


class _WithLoss(nn.Module):
    """model and loss as one module, so that one graph holds both."""

    def __init__(self, model: nn.Module, source: ModelSource) -> None:
        super().__init__()
        self.model = model
        self.source = source

    def forward(self, inputs: Any, targets: Any) -> Any:
        outputs = call_model(self.model, inputs)
        loss_fn, returned = self.source.loss_fn, plain(outputs)
        loss = returned if loss_fn is None else _loss_of(loss_fn, outputs, targets)
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():  # while it is exported
            of = list(self.model.parameters()) if loss_fn is None else returned
            check_returned(loss, of=of, where=self.source.where, has_loss_fn=loss_fn is not None)
        return (loss, ()) if loss_fn is None else (loss, returned)


def _loss_of(loss_fn: Callable[[Any, Any], torch.Tensor], outputs: Any, targets: Any) -> torch.Tensor:
    """The user's loss, in a function of its own, so that an error tells whether it came through here: `LOSS_CALL`."""
    return loss_fn(outputs, targets)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """The model on its inputs, as `model_calls` of the runtime does it; importing that takes as long as torch."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _build_model(source: ModelSource) -> nn.Module:
    with torch.device("meta"):
        model = source.build_model()
    if not isinstance(model, nn.Module):
        raise InputError.of(
            f"{source.where}: build_model", found=type(model).__name__, expected="an nn.Module", fix="return the model"
        )
    check_parameters(model, source.where)
    return in_traced_dtype(model).train()


def check_parameters(model: nn.Module, where: str) -> None:
    """Return when all parameters are real.

    Raises: InputError for a complex one, which no data-parallel group of `fully_shard` takes beside real ones.
    """
    name = next((name for name, parameter in model.named_parameters() if parameter.is_complex()), None)
    if name is not None:
        raise InputError.of(
            f"{where}: {name}",
            found="a parameter of complex numbers",
            expected="parameters of real numbers",
            fix="keep pairs, nn.Parameter(torch.view_as_real(weight)), and in forward take"
            " torch.view_as_complex(self.weight.float())",
        )


def in_traced_dtype(model: nn.Module) -> nn.Module:
    """The model with its real numbers in `DTYPE`; `model.to(DTYPE)` would make complex ones real."""
    model._apply(lambda t: t.to(DTYPE) if t.is_floating_point() else t)  # type: ignore[no-untyped-call]
    return model


def _trace(source: ModelSource, batch_size: int) -> Trace:
    """A trace; where one lacks values to decide by, another with the answers that follow from constants."""
    try:
        return _trace_once(source, batch_size, {})
    except TraceError as error:
        answers = _answers(source, batch_size) if error.__cause__ and lacks_values(error.__cause__) else {}
        if not answers:
            raise
    return _trace_once(source, batch_size, answers)


def _trace_once(source: ModelSource, batch_size: int, answers: Answers) -> Trace:
    model, batch = _build_model(source), meta_batch(source, batch_size)  # in this order, as programs call them
    check_samples(functools.partial(meta_batch, source), where=source.where)
    with _on_meta(), shapes_without_values():
        try:
            with watch_dissolved(model) as dissolved, ValuesAsOperators(), Answering(answers):
                program = torch.export.export(_WithLoss(model, source), batch, strict=False)
            writes, is_decomposed = writes_numbers(program.graph), _needs_functionalization(program)
            if is_decomposed:
                dissolved |= {IN_PLACE} if writes_across_blocks(program) else set()
                keep_no_grad(program)
                program = program.run_decompositions({})
                with_whole_dropout(program.graph)
        except InputError:
            raise
        except USERS_ERRORS as error:
            place = _escaping_place(source, batch_size, answers) if leaves_the_trace(error) else ""
            raise TraceError(trace_failure(source.where, error, model, place=place)) from error
    if writes and batch_size == BATCH_A:
        _refuse_writes(source, batch_size, answers)
    signature = program.graph_signature
    parameters = [spec.target for spec in signature.output_specs if spec.kind.name == "PARAMETER_MUTATION"]
    refuse_written(source.where, [str(name).removeprefix("model.") for name in parameters])
    if signature.user_inputs_to_mutate:
        written = [signature.user_inputs.index(name) for name in signature.user_inputs_to_mutate.values()]
        check_written(as_given(_made_batch(source, batch_size)), written, where=source.where)
        dissolved.add(WRITES_BATCH)
    _refuse_freezing(source.where, dissolved)
    _refuse_replaced(source.where, dissolved)
    check_operands(program, where=source.where, run=lambda: _run_again(source, batch_size, answers))
    with_values(program, where=source.where, run=lambda: _run_again(source, batch_size, answers))
    without_copies(program.graph)
    return Trace(program, model, batch, tuple(sorted(dissolved)), is_decomposed, answers)


def refuse_written(where: str, names: Sequence[str]) -> None:
    """Raises TraceError for parameters that forward writes into: sharded ones and generated code forget it."""
    if names:
        raise TraceError(
            f"{where}: forward writes into the parameter {names[0]}\n"
            "  expected: parameters that only the optimizer changes\n"
            "  fix: keep weights that forward updates, such as a moving average, in buffers (self.register_buffer),"
            " which a module may have in place of parameters"
        )


def _refuse_writes(source: ModelSource, batch_size: int, answers: Answers) -> None:
    """Raises TraceError where autograd would refuse what the model writes in place."""
    model, batch = _build_model(source), meta_batch(source, batch_size)

    def loss() -> Any:
        return pytree.tree_leaves(_WithLoss(model, source)(*batch)[0])[0]

    with _on_meta(), shapes_without_values(), ValuesAsOperators(), Answering(answers):
        parameters = [own for own in model.parameters() if own.requires_grad]
        refuse_what_autograd_refuses(loss, parameters, where=source.where)


def _refuse_freezing(where: str, dissolved: set[str]) -> None:
    """Raises TraceError for a forward that freezes or unfreezes parameters: the graph has one answer for all of it."""
    if FREEZING in dissolved:
        raise TraceError(
            f"{where}: forward changes requires_grad of parameters\n"
            "  expected: the same parameters to get gradients in all of forward and in every step\n"
            "  fix: freeze in build_model; or use --module-level, which runs forward as it is, without tensor and"
            " pipeline parallelism"
        )


def _refuse_replaced(where: str, dissolved: set[str]) -> None:
    """Raises TraceError for weights that are replaced, which needs generated code, beside gradients that it lacks."""
    own = sorted(OWN_GRADIENTS & dissolved)
    if own and REPLACED in dissolved:
        raise TraceError(
            f"{where}: forward calls modules by torch.func.functional_call, and has its own {own[0]}\n"
            "  expected: one of them: code generated from the trace has no gradients of yours, and your own modules run"
            " with other weights only where nothing wraps them\n"
            "  fix: use --module-level, for data parallelism and ZeRO; or write one of them as tensor operations"
        )


def _run_again(source: ModelSource, batch_size: int, answers: Answers) -> None:
    """Run the model and its loss as a trace does."""
    model, batch = _build_model(source), meta_batch(source, batch_size)
    with _on_meta(), shapes_without_values(), ValuesAsOperators(), Answering(answers):
        _WithLoss(model, source)(*batch)


def _escaping_place(source: ModelSource, batch_size: int, answers: Answers) -> str:
    """The line of forward or the loss whose tensors a trace does not follow."""
    model, batch = _build_model(source), meta_batch(source, batch_size)
    with ValuesAsOperators(), Answering(answers):
        return escaping_place(lambda: _WithLoss(model, source)(*batch))


def _answers(source: ModelSource, batch_size: int) -> Answers:
    """What forward decides by constants; nothing where it decides by other values, too, or fails."""
    with _on_meta(), shapes_without_values():
        try:
            values = source.buffers() if source.buffers else known_buffers(source.build_model)
            model, batch = _build_model(source), meta_batch(source, batch_size)
            with like_an_export():
                return find_answers(lambda: _WithLoss(model, source)(*batch), model, values)
        except USERS_ERRORS:  # the trace that comes before or after says what there is to say
            return {}


def example_batch(source: ModelSource, batch_size: int) -> tuple[Any, Any]:
    """A batch with its values, as the model file makes it once a model is built."""
    with torch.device("meta"):
        source.build_model()
    inputs, targets = as_given(_made_batch(source, batch_size))
    return inputs, targets


def _made_batch(source: ModelSource, batch_size: int) -> Any:
    return made_batch(source.make_batch, batch_size, where=source.where, has_overrides=source.has_overrides)


def meta_batch(source: ModelSource, batch_size: int) -> tuple[Any, Any]:
    """A checked batch of the model file, on the meta device."""
    where = f"{source.where}: make_batch({batch_size})"
    batch = as_given(_made_batch(source, batch_size))
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise InputError.of(where, found=type(batch).__name__, expected="(inputs, targets)", fix="return a pair")

    def to_meta(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() == 0 or value.shape[0] != batch_size:
            raise InputError.of(
                where,
                found=f"a tensor of shape {list(value.shape)}",
                expected=f"first dim = batch size {batch_size}",
                fix="put the batch dim first in every tensor of the batch",
            )
        if str(value.dtype).removeprefix("torch.") not in DTYPE_BYTES:
            raise InputError.of(
                where,
                found=f"a tensor of {value.dtype}",
                expected=f"one of {', '.join(DTYPE_BYTES)}",
                fix="write .long(), or .astype('int64') of an array, in make_batch and in the dataset",
            )
        return torch.empty_like(value, device="meta", dtype=DTYPE if value.is_floating_point() else value.dtype)

    inputs, targets = pytree.tree_map(to_meta, tuple(batch))
    return inputs, targets


def _needs_functionalization(program: torch.export.ExportedProgram) -> bool:
    """Whether the graph holds in-place ops or sub-graphs; removing them costs as much as a trace."""
    for node in program.graph.nodes:
        if node.op == "call_function" and (
            isinstance(node.target, torch._ops.HigherOrderOperator)
            or (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable)
        ):
            return True
    return False


@contextlib.contextmanager
def _on_meta() -> Iterator[None]:
    """Inside, a model runs on meta tensors, quietly: warnings and logs of torch.export are about its internals."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
            autocast_on_meta(),
            batch_norm_of_one_process(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
