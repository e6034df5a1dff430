"""What went wrong in the user's code, in the user's terms: the file, the line, and what to do."""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autoplan.errors import InputError

USERS_ERRORS = (Exception, SystemExit)  # what the user's code may raise; sys.exit there is not to end autoplan
LOSS_CALL = "_loss_of"  # the function of ours that calls the user's loss_fn
_LIBRARIES = f"site-packages{os.sep}"
_NOT_THE_USERS = ("site-packages", "/lib/python", str(Path(__file__).parent) + os.sep)
_NO_VALUE = (
    r"Could not guard|Could not extract|\.numpy\(\) is not supported for tensor subclasses"
    r"|unsupported format string passed to FakeTensor"
)
_DATA_DEPENDENT = rf"{_NO_VALUE}|DataDependent|DynamicOutputShape|data-dependent|unbacked|aten\._local_scalar_dense"
_WANTS_INTEGERS = (
    r"Expected dtype int32/int64 for index, but got torch\.(\w+)|scalar types: Long, Int; but got torch\.(\w+)"
    r"|IndexTensor|tensors used as indices must be"
)
_WANTS_FLOATS = (
    r"could not infer output dtype\. .*Got: torch\.(\w+)|Integral inputs not supported|Expected floating point type for"
)
_LEAVES_TRACE = "We found a fake tensor in the exported program constant's list"
_OTHER_DEVICE = r"(?s)\bmeta\b.*\bcpu\b|\bcpu\b.*\bmeta\b"


FUNCTION_TRANSFORMS_FIX = (
    "write samples as a batch, and take gradients by torch.autograd.grad(..., create_graph=True) with --module-level,"
    " which runs forward as it is, without tensor and pipeline parallelism"
)


def import_failure(path: Path, error: BaseException) -> str:
    """Why a file of the user cannot be imported: what was found in which line, what was expected, and the fix."""
    expected, fix = "a Python file that can be imported", "import it by Python alone, and mend what fails there"
    if isinstance(error, SystemExit):
        expected = "a file that defines its functions when it is imported, and ends nothing"
        fix = 'put what runs it as a script (argparse, sys.exit, training) under `if __name__ == "__main__":`'
    elif isinstance(error, SyntaxError):
        expected, fix = f"Python {sys.version_info.major}.{sys.version_info.minor}", "correct the line"
    elif isinstance(error, ModuleNotFoundError) and error.name:
        fix = f"install the package that provides {error.name}, or put its file beside the model file"
    return f"{path}: importing the file failed: {user_frame(error, path)}\n  expected: {expected}\n  fix: {fix}"


def user_frame(error: BaseException, path: Path) -> str:
    """The error with the innermost line of the user's file."""
    if isinstance(error, SyntaxError):
        where = f" ({Path(error.filename or path).name}, line {error.lineno})" if error.lineno else ""
        return f"{type(error).__name__}: {error.msg}{where}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if f.filename == str(path.absolute()) and f.lineno]
    text = what_failed(error) if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
    return text + (f" (line {lines[-1]})" if lines else "")


def what_failed(error: BaseException) -> str:
    """`ValueError: MESSAGE`; of a call that would have ended Python, `sys.exit(CODE)`."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r})"
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def users_place(error: BaseException) -> str:
    """` at FILE:LINE: TEXT`, the innermost line of the user's code that an error came through.

    Where it came through none, as when a model is a library's, the innermost line of a library other than torch.
    """
    return users_line(traceback.extract_tb(error.__traceback__))


def users_line(stack: traceback.StackSummary) -> str:
    """`users_place` of a stack."""
    frames = [own for own in stack if not own.filename.startswith("<")]
    users = [own for own in frames if not any(part in own.filename for part in _NOT_THE_USERS)]
    libraries = [own for own in frames if _LIBRARIES in own.filename and f"{_LIBRARIES}torch" not in own.filename]
    found = users or libraries
    return f" at {found[-1].filename}:{found[-1].lineno}: {found[-1].line}" if found else ""


def module_place(error: BaseException, model: Any) -> str:
    """`, in module net.3 (Linear)`: the innermost module that an error came through, where it is torch's own.

    No line of the user's file tells which that is where a Sequential calls its parts.
    """
    names = {id(module): name for name, module in model.named_modules()}
    selves = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    inside = [own for own in selves if names.get(id(own))]
    if not inside or not type(inside[-1]).__module__.startswith("torch."):
        return ""
    return f", in module {names[id(inside[-1])]} ({type(inside[-1]).__name__})"


def made_batch(make_batch: Callable[[int], Any], batch_size: int, *, where: str, has_overrides: bool = False) -> Any:
    """What the user's `make_batch` gives; `has_overrides` tells whether --set values may be why it fails.

    Raises: InputError with the line of the user's file that failed.
    """
    _check_takes_size(make_batch, where)
    try:
        return make_batch(batch_size)
    except USERS_ERRORS as error:
        found = what_failed(error) + users_place(error)
        fix = "correct it, or the --set values it works with" if has_overrides else "correct it"
        raise InputError.of(
            f"{where}: make_batch failed", found=found, expected="(inputs, targets)", fix=fix
        ) from error


def _check_takes_size(make_batch: Callable[[int], Any], where: str) -> None:
    signature = inspect.signature(make_batch)
    try:
        signature.bind(1)
    except TypeError as error:
        raise InputError.of(
            f"{where}: make_batch",
            found=f"make_batch{signature}",
            expected="make_batch(batch_size) -> (inputs, targets)",
            fix="let it take the number of samples, the first dim of every tensor, as its only argument",
        ) from error


def check_takes(function: Any, name: str, arguments: Sequence[str], *, where: str) -> None:
    """Return when the program can call a function of the user's file with these arguments.

    Raises: InputError when it is none, or takes others.
    """
    found = f"{name} = {function!r}"
    try:
        signature = inspect.signature(function)
        found = f"{name}{signature}"
        signature.bind(*arguments)
    except TypeError:
        raise InputError.of(
            f"{where}: {name}",
            found=found,
            expected=f"{name}({', '.join(arguments)})",
            fix="let it take these arguments, used or not",
        ) from None


class _Failure(NamedTuple):
    """One way in which a trace fails, and what to tell of it.

    Attributes:
        says: what is found in the type and the message of the error.
        through: a function that the error came through; "" for any.
        found: what was found, of {dtype} if a dtype was; "" for the error itself.
    """

    says: str
    expected: str
    fix: str
    through: str = ""
    found: str = ""


# The first that fits is told; the last fits every error.
_FAILURES = (
    _Failure(
        _NO_VALUE,
        "a loss_fn of tensor operations, which can be split over devices",
        "leave out .item(), float(), int() and f-strings: keep tensors (loss.detach(), torch.clamp, torch.where),"
        " and log outside of loss_fn; or use --module-level, which plans without tensor and pipeline parallelism",
        through=LOSS_CALL,
        found="a Python number, text or branch that is made of the values of a tensor",
    ),
    _Failure(
        _WANTS_INTEGERS,
        "integers of torch.long as the targets of this loss",
        "write .long() in that line, or return targets so from make_batch and the dataset; or take a loss of"
        " floating-point targets, such as F.mse_loss",
        through=LOSS_CALL,
        found="{dtype} where torch.long is needed, as for classes or indices",
    ),
    _Failure(
        _WANTS_INTEGERS,
        "integers of torch.long",
        "write .long() in that line, or return it so from make_batch and the dataset",
        found="{dtype} where torch.long is needed, as for classes or indices",
    ),
    _Failure(
        _WANTS_FLOATS,
        "floating-point targets of this loss",
        "return targets as floats, .float(), from make_batch and the dataset; or take a loss of classes, which"
        " are integers with one dim less than the outputs, such as F.cross_entropy",
        through=LOSS_CALL,
        found="{dtype} where floating-point numbers are needed",
    ),
    _Failure(
        _DATA_DEPENDENT,
        "a mask that follows from constants and buffers, or a call that says what mask it is",
        "pass is_causal=True beside a causal mask, and False beside any other: self.encoder(x, mask=mask,"
        " is_causal=True); for decoders and nn.Transformer, tgt_is_causal; a mask that __init__ makes belongs in"
        " a buffer (self.register_buffer)",
        through="_detect_is_causal_mask",
    ),
    _Failure(
        _DATA_DEPENDENT,
        "a forward whose operators do not depend on the values of tensors",
        "replace a branch on data by torch.where or torch.cond, or move it out of forward;"
        " or use --module-level, which plans without tensor and pipeline parallelism",
    ),
    _Failure(
        r"^SystemExit\b",
        "a forward and a loss_fn that return",
        "raise an error in place of sys.exit, and mend its cause",
    ),
    _Failure(
        _OTHER_DEVICE,
        "a loss_fn that makes its tensors where the outputs are: models are traced on the meta device",
        "make it in loss_fn, by torch.tensor([...], device=outputs.device); one of many numbers belongs in a buffer"
        " of a model that returns its loss",
        through=LOSS_CALL,
    ),
    _Failure(
        r"(?i)bfloat16",
        "a loss_fn that runs in bfloat16, in which models are traced whatever the precision of the plan",
        "cast to float32 in loss_fn: outputs.float(), and targets that are not integers likewise",
        through=LOSS_CALL,
    ),
    _Failure(
        "",
        "a loss_fn that takes what the model returns for the batch of make_batch, and its targets",
        "call loss_fn on the outputs for one batch yourself, outside of autoplan, and mend what fails there",
        through=LOSS_CALL,
    ),
    _Failure(
        _LEAVES_TRACE,
        "a forward that takes no gradients (torch.autograd.grad) and neither reads nor writes .data",
        "write .detach() for .data; gradients taken in forward cannot be traced: use --module-level, which runs"
        " forward as it is, without tensor and pipeline parallelism",
        found="a tensor that torch.export does not follow",
    ),
    _Failure(
        r"(?s)^AttributeError\b.*has no attribute 'constant'",
        "a forward without torch.func.grad, vmap and their like around modules",
        FUNCTION_TRANSFORMS_FIX,
    ),
    _Failure(
        "in output, which is not a known type",
        "a model that returns tensors, alone or in tuples, lists, dicts or dataclasses that torch knows",
        "return only what the loss reads; a Hugging Face model returns no cache with use_cache=False in its config;"
        " or register the class by torch.utils._pytree.register_pytree_node",
    ),
    _Failure(
        _OTHER_DEVICE,
        "a forward that makes its tensors where its input is: models are traced on the meta device",
        "make this tensor with device=x.device, or register it in __init__ by self.register_buffer(...);"
        " or use --module-level, which runs the model on the CPU",
    ),
    _Failure(
        r"(?i)bfloat16",
        "a forward that runs in bfloat16, in which models are traced whatever the precision of the plan",
        "cast to float32 around this operator: operator(x.float()).to(x.dtype); or where only some operands are in"
        " float32, such as masks that forward makes, make those with dtype=x.dtype",
    ),
    _Failure(
        r"(?s)^TypeError\b.*forward\(\) .*argument",
        "a forward that takes the inputs of make_batch: model(**inputs) of a dict, model(*inputs) of a tuple",
        "give forward an argument for each key or item, or return the inputs from make_batch as it takes them",
    ),
    _Failure(
        "",
        "a forward that runs on the batch of make_batch, on meta tensors too",
        "call the model on one batch yourself, outside of autoplan, and mend what fails there; where nothing does, use"
        " --module-level, which runs forward as it is, without tensor and pipeline parallelism",
    ),
)


def lacks_values(error: BaseException) -> bool:
    """Whether a trace failed since something depends on the values of tensors."""
    return re.search(_DATA_DEPENDENT, _said(error)) is not None


def leaves_the_trace(error: BaseException) -> bool:
    """Whether it failed since forward computes with tensors that a trace does not follow; it names no line then."""
    return re.search(_LEAVES_TRACE, _said(error)) is not None


def trace_failure(name: str, error: BaseException, model: Any, *, place: str = "") -> str:
    """Why `torch.export` could not follow the model or its loss: file and line, what was found, and the ways out.

    `place` is where that was, if the error does not tell.
    """
    passed = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    told = next(row for row in _FAILURES if row.through in {"", *passed} and re.search(row.says, _said(error)))
    found = told.found.format(dtype=_dtype_found(told, error)) or what_failed(error)
    failed = "loss_fn fails" if LOSS_CALL in passed else "torch.export cannot trace the model"
    where = (users_place(error) or place) + module_place(error, model)
    return f"{name}: {failed}{where}\n  found: {found}\n  expected: {told.expected}\n  fix: {told.fix}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__} {error}"


def _dtype_found(told: _Failure, error: BaseException) -> str:
    """`int64`; models are traced in bfloat16, which the user's floating-point numbers became."""
    match = re.search(told.says, _said(error))
    found = next(filter(None, match.groups() if match else ()), "another dtype")
    return "floating-point numbers" if found == "bfloat16" else found
