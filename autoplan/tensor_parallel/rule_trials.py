"""Running one operator on random values: whole, and on the parts that a strategy gives each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoplan.graph import Argument, Op, PerSample, Ref, Symbol, TensorSpec, extent_at
from autoplan.layout import Layout, P
from autoplan.rules import Specs, Strategy
from autoplan.user_errors import first_line

DEGREES = (2, 3)
BATCH_SIZE = 6  # divides by both degrees
TOLERANCE = 1e-9
MAX_ELEMENTS = 2**24  # of the operands together; a smaller configuration of the model shows the same rule
MAX_TRIALS = 2000  # letters tried per call


class CannotTryError(Exception):
    """The operator cannot be run here as a trial needs it."""


@dataclass(slots=True)
class Trial:
    """One call of an operator on random numbers; `holds` tries a strategy on it."""

    run: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
    operands: list[torch.Tensor]
    results: list[torch.Tensor]
    seeds: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    has_backward: bool
    saves: tuple[int, ...] | None
    n_tried: int = 0

    @property
    def result_shape(self) -> tuple[int, ...]:
        return tuple(self.results[0].shape)

    @classmethod
    def of(cls, op: Op, operands: Specs) -> Trial:
        """Run the whole op, forward and backward.

        Raises: CannotTryError when its results would say nothing.
        """
        if sum(spec.n_elements(BATCH_SIZE) for spec in operands) > MAX_ELEMENTS:
            raise CannotTryError("its tensors are too large to try; make the model smaller with --set")
        generator = torch.Generator().manual_seed(0)
        values = [_random(spec, generator) for spec in operands]
        run = _runner(op)
        leaves = [_leaf(value) for value in values]
        try:
            with _Saved(leaves) as saved:
                results = run(leaves)
            again = run(values)
        except Exception as error:  # the user's operator: whatever it raises says why it cannot be tried
            raise CannotTryError(f"it does not run on the CPU in float64 ({first_line(error)[:100]})") from error
        if not all(_close(a.detach(), b) for a, b in zip(results, again, strict=True)):
            raise CannotTryError("it gives other results each time")
        seeds = [torch.rand(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for r in results]
        has_backward = _backward(results, seeds)
        gradients = [leaf.grad if has_backward else None for leaf in leaves]
        whole = [result.detach() for result in results]
        return cls(run, values, whole, seeds, gradients, has_backward, saved.places(results) if has_backward else None)

    def holds(self, strategy: Strategy) -> bool:
        """Whether the strategy gives the whole op's results and gradients on 2 and on 3 shards."""
        self.n_tried += 1
        return self.n_tried <= MAX_TRIALS and all(self._holds_on(strategy, degree) for degree in DEGREES)

    def _holds_on(self, strategy: Strategy, degree: int) -> bool:
        """Forward first: an operator may not survive backward on shapes that do not belong together."""
        leaves_of, found = [], []
        try:
            for rank in range(degree):
                pairs = zip(self.operands, strategy.operands, strict=True)
                leaves_of.append([_leaf(_part(value, layout, rank, degree)) for value, layout in pairs])
                found.append(self.run(leaves_of[-1]))
        except Exception:  # the operator refuses these shapes: the split is not possible
            return False
        for whole, *parts in zip(self.results, *found, strict=True):
            if not _are_parts(parts, strategy.result, whole):
                return False
        if not self.has_backward:
            return True
        for rank, results in enumerate(found):
            if not _backward(results, [_seed_part(seed, strategy.result, rank, degree) for seed in self.seeds]):
                return False
        columns = zip(self.gradients, zip(*leaves_of, strict=True), strategy.operands, strict=True)
        return all(
            gradient is None or _is_gradient([leaf.grad for leaf in leaves], layout, gradient)
            for gradient, leaves, layout in columns
        )


class _Saved:
    """Which tensors a forward pass keeps."""

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        self.leaves, self.kept = leaves, set[int]()
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    def __enter__(self) -> _Saved:
        self.hooks.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self.hooks.__exit__(*details)

    def places(self, results: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Positions of the operands that were kept, and -1 for the first result."""
        found = [i for i, x in enumerate(self.leaves) if x.untyped_storage().data_ptr() in self.kept]
        return (*found, -1) if results[0].untyped_storage().data_ptr() in self.kept else tuple(found)


def _runner(op: Op) -> Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]:
    function: Any = torch.ops
    for name in op.target.split("."):
        function = getattr(function, name)

    def run(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        left = iter(tensors)
        arguments = [_value(argument, left) for argument in op.args]
        keywords = {key: _value(argument, left) for key, argument in op.kwargs}
        results = function(*arguments, **keywords)
        return tuple(results) if isinstance(results, tuple | list) else (results,)

    return run


def _value(argument: Argument, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(argument, Ref):
        return next(tensors)
    if isinstance(argument, tuple):
        return [_value(item, tensors) for item in argument]
    if isinstance(argument, PerSample):
        return extent_at(argument, BATCH_SIZE)
    if isinstance(argument, Symbol):
        return _symbol(argument.text)
    return argument


def _symbol(text: str) -> Any:
    if text == "device":
        return torch.device("cpu")
    name = text.removeprefix("dtype:").removeprefix("torch.")
    return torch.float64 if name in ("compute", "float32", "bfloat16", "float16") else getattr(torch, name)


def _random(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Numbers in (0.1, 1.1), 0 or 1, or true and false."""
    shape = spec.at(BATCH_SIZE)
    if spec.is_float:
        dtype = torch.complex128 if spec.is_complex else torch.float64
        return torch.rand(shape, generator=generator, dtype=dtype) + 0.1
    return torch.randint(2, shape, generator=generator).to(getattr(torch, spec.dtype))


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_(_is_float(value))


def _is_float(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _backward(results: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]) -> bool:
    """Whether there is a backward pass, and it ran."""
    pairs = [(r, s) for r, s in zip(results, seeds, strict=True) if r.requires_grad]
    if not pairs:
        return False
    try:
        torch.autograd.backward([r for r, _ in pairs], [s for _, s in pairs])
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _part(value: torch.Tensor, layout: Layout, rank: int, degree: int) -> torch.Tensor:
    if layout.kind == "S":
        return value.tensor_split(degree, dim=layout.dim)[rank]
    if layout.kind == "P":
        return value * (rank + 1) / (degree * (degree + 1) / 2) if _is_float(value) else value * (rank == 0)
    return value


def _seed_part(seed: torch.Tensor, layout: Layout, rank: int, degree: int) -> torch.Tensor:
    return seed if layout == P else _part(seed, layout, rank, degree)


def _joined(parts: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    return torch.cat(list(parts), dim=layout.dim) if layout.kind == "S" else torch.stack(list(parts)).sum(0)


def _are_parts(parts: Sequence[torch.Tensor], layout: Layout, whole: torch.Tensor) -> bool:
    """Whether the parts make up the whole, each of the shape that its place has."""
    degree = len(parts)
    if any(part.shape != _seed_part(whole, layout, rank, degree).shape for rank, part in enumerate(parts)):
        return False
    return _close(_joined([part.detach() for part in parts], layout), whole)


def _is_gradient(parts: Sequence[torch.Tensor | None], layout: Layout, whole: torch.Tensor) -> bool:
    if any(part is None for part in parts):
        return False
    found = [part for part in parts if part is not None]
    return all(_close(part, whole) for part in found) if layout == P else _close(_joined(found, layout), whole)


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape:
        return False
    dtype = torch.complex128 if left.is_complex() or right.is_complex() else torch.float64
    return torch.allclose(left.to(dtype), right.to(dtype), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
