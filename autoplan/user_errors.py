"""What went wrong in the user's code, in the user's terms: the file, the line, and what to do."""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autoplan.errors import InputError

USERS_ERRORS = (Exception, SystemExit)  # what the user's code may raise; sys.exit there is not to end autoplan
LOSS_CALL = "_loss_of"  # the function of ours that calls the user's loss_fn
_LIBRARIES = f"site-packages{os.sep}"
_NOT_THE_USERS = ("site-packages", "/lib/python", str(Path(__file__).parent) + os.sep)
_DATA_DEPENDENT = (
    "DataDependent",
    "DynamicOutputShape",
    "data-dependent",
    "unbacked",
    "aten._local_scalar_dense",
)
_NO_VALUE = (
    "Could not guard",
    "Could not extract",
    ".numpy() is not supported for tensor subclasses",
    "unsupported format string passed to FakeTensor",
)
_WANTS_INTEGERS = re.compile(
    r"Expected dtype int32/int64 for index, but got torch\.(\w+)|scalar types: Long, Int; but got torch\.(\w+)"
    r"|IndexTensor|tensors used as indices must be"
)
_WANTS_FLOATS = re.compile(
    r"could not infer output dtype\. .*Got: torch\.(\w+)|Integral inputs not supported|Expected floating point type for"
)
_NO_PYTREE = "in output, which is not a known type"
_FAKE_CONSTANT = "We found a fake tensor in the exported program constant's list"
_OTHER_DEVICE = re.compile(r"\bmeta\b.*\bcpu\b|\bcpu\b.*\bmeta\b", re.DOTALL)


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


def lacks_values(error: BaseException) -> bool:
    """Whether a trace failed since something depends on the values of tensors."""
    return any(word in f"{type(error).__name__} {error}" for word in (*_DATA_DEPENDENT, *_NO_VALUE))


def trace_failure(name: str, error: BaseException, model: Any) -> str:
    """Why `torch.export` could not follow the model or its loss: file and line, what was found, and the ways out."""
    where = users_place(error) + module_place(error, model)
    is_loss = _passed(error, LOSS_CALL)
    failed = "loss_fn fails" if is_loss else "torch.export cannot trace the model"
    found = what_failed(error)
    if is_loss and any(word in str(error) for word in _NO_VALUE):
        found = "a Python number, text or branch that is made of the values of a tensor"
        expected = "a loss_fn of tensor operations, which can be split over devices"
        fix = (
            "leave out .item(), float(), int() and f-strings: keep tensors (loss.detach(), torch.clamp, torch.where),"
            " and log outside of loss_fn; or use --module-level, which plans without tensor and pipeline parallelism"
        )
    elif wanted := _WANTS_INTEGERS.search(str(error)):
        found = f"{_dtype_found(wanted)} where torch.long is needed, as for classes or indices"
        expected = "integers of torch.long" + (" as the targets of this loss" if is_loss else "")
        fix = (
            f"write .long() in that line, or return {'targets' if is_loss else 'it'} so from make_batch and the dataset"
        )
        fix += "; or take a loss of floating-point targets, such as F.mse_loss" if is_loss else ""
    elif is_loss and (wanted := _WANTS_FLOATS.search(str(error))):
        found = f"{_dtype_found(wanted)} where floating-point numbers are needed"
        expected = "floating-point targets of this loss"
        fix = (
            "return targets as floats, .float(), from make_batch and the dataset; or take a loss of classes, which"
            " are integers with one dim less than the outputs, such as F.cross_entropy"
        )
    elif _passed(error, "_detect_is_causal_mask"):
        expected = "a mask that follows from constants and buffers, or a call that says what mask it is"
        fix = (
            "pass is_causal=True beside a causal mask, and False beside any other: self.encoder(x, mask=mask,"
            " is_causal=True); for decoders and nn.Transformer, tgt_is_causal; a mask that __init__ makes belongs in"
            " a buffer (self.register_buffer)"
        )
    elif lacks_values(error):
        expected = "a forward whose operators do not depend on the values of tensors"
        fix = (
            "replace a branch on data by torch.where or torch.cond, or move it out of forward;"
            " or use --module-level, which plans without tensor and pipeline parallelism"
        )
    elif isinstance(error, SystemExit):
        expected, fix = "a forward and a loss_fn that return", "raise an error in place of sys.exit, and mend its cause"
    elif is_loss and _OTHER_DEVICE.search(str(error)):
        expected = "a loss_fn that makes its tensors where the outputs are: models are traced on the meta device"
        fix = (
            "make it in loss_fn, by torch.tensor([...], device=outputs.device); one of many numbers belongs in a buffer"
            " of a model that returns its loss"
        )
    elif is_loss and "bfloat16" in str(error).lower():
        expected = "a loss_fn that runs in bfloat16, in which models are traced whatever the precision of the plan"
        fix = "cast to float32 in loss_fn: outputs.float(), and targets that are not integers likewise"
    elif is_loss:
        expected = "a loss_fn that takes what the model returns for the batch of make_batch, and its targets"
        fix = "call loss_fn on the outputs for one batch yourself, outside of autoplan, and mend what fails there"
    elif _FAKE_CONSTANT in str(error):
        expected = "a forward that takes no gradients (torch.autograd.grad) and neither reads nor writes .data"
        fix = (
            "write .detach() for .data; gradients taken in forward cannot be traced: use --module-level, which runs"
            " forward as it is, without tensor and pipeline parallelism"
        )
    elif isinstance(error, AttributeError) and "has no attribute 'constant'" in str(error):
        expected, fix = "a forward without torch.func.grad, vmap and their like around modules", FUNCTION_TRANSFORMS_FIX
    elif _NO_PYTREE in str(error):
        expected = "a model that returns tensors, alone or in tuples, lists, dicts or dataclasses that torch knows"
        fix = (
            "return only what the loss reads; a Hugging Face model returns no cache with use_cache=False in its config;"
            " or register the class by torch.utils._pytree.register_pytree_node"
        )
    elif _OTHER_DEVICE.search(str(error)):
        expected = "a forward that makes its tensors where its input is: models are traced on the meta device"
        fix = (
            "make this tensor with device=x.device, or register it in __init__ by self.register_buffer(...);"
            " or use --module-level, which runs the model on the CPU"
        )
    elif "bfloat16" in str(error).lower():
        expected = "a forward that runs in bfloat16, in which models are traced whatever the precision of the plan"
        fix = (
            "cast to float32 around this operator: operator(x.float()).to(x.dtype); or where only some operands are in"
            " float32, such as masks that forward makes, make those with dtype=x.dtype"
        )
    elif isinstance(error, TypeError) and "forward() " in str(error) and "argument" in str(error):
        expected = "a forward that takes the inputs of make_batch: model(**inputs) of a dict, model(*inputs) of a tuple"
        fix = "give forward an argument for each key or item, or return the inputs from make_batch as it takes them"
    else:
        expected = "a forward that runs on the batch of make_batch"
        fix = "call the model on one batch yourself, outside of autoplan, and mend what fails there"
    return f"{name}: {failed}{where}\n  found: {found}\n  expected: {expected}\n  fix: {fix}"


def _passed(error: BaseException, function: str) -> bool:
    """Whether an error came through a function of this name."""
    return any(frame.name == function for frame in traceback.extract_tb(error.__traceback__))


def _dtype_found(match: re.Match[str]) -> str:
    """`int64`; models are traced in bfloat16, which the user's floating-point numbers became."""
    found = next(filter(None, match.groups()), "another dtype")
    return "floating-point numbers" if found == "bfloat16" else found
