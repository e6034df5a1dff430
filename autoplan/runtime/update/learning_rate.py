"""The learning rate over a run: warm-up, then one of a few curves down to a smallest rate.

With the optimizer's own rate r, the smallest rate m, W warm-up steps and N steps, step t (from 0) has

    t < W    r (t + 1) / W
    else     m + (r - m) curve(p),    p = (t - W) / (N - W), at most 1

so that a run of fewer steps than its warm-up takes the first of them.

A model file with `build_scheduler(optimizer, n_steps)` replaces all of it: any object of `torch.optim.lr_scheduler`;
`ReduceLROnPlateau` sees the loss of each step.
"""

from __future__ import annotations

import math
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from ..refusal import Refusal
from .optimizer import LEARNING_RATE

CURVES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda p: 1.0,
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
    "linear": lambda p: 1.0 - p,
}


class LearningRateError(Refusal):
    """A rate does not suit the optimizer."""


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A learning-rate schedule.

    Attributes:
        curve: a key of `CURVES`.
        n_steps: of the whole run, warm-up included.
        smallest: the rate at the end; without effect on the constant curve.
    """

    curve: str = "constant"
    n_steps: int = 1
    warmup_steps: int = 0
    smallest: float = 0.0

    def __post_init__(self) -> None:
        if self.curve not in CURVES:
            raise ValueError(f"--lr-schedule: found {self.curve!r}, expected one of {', '.join(CURVES)}")
        if self.warmup_steps < 0:
            raise ValueError(f"--warmup-steps: found {self.warmup_steps}, expected 0 or more")
        if self.smallest < 0.0:
            raise ValueError(f"--min-lr: found {self.smallest:g}, expected 0 or more")

    def at(self, step: int, *, largest: float) -> float:
        """The rate of a step, of an optimizer whose own rate is `largest`."""
        if step < self.warmup_steps:
            return largest * (step + 1) / self.warmup_steps
        if self.curve == "constant":
            return largest
        part = min(1.0, (step - self.warmup_steps) / max(1, self.n_steps - self.warmup_steps))
        return self.smallest + (largest - self.smallest) * CURVES[self.curve](part)


def check_rate(parser: ArgumentParser, options: Namespace, model_file: Any) -> None:
    """A usage error for rates of `train.py` that do not go together, or that do nothing.

    Those of a model file are not known yet.

    What the model file decides by itself is said. Without --lr, `options.lr` becomes `AdamW`'s.
    """
    for name, ignored in _ignored(options, model_file):
        if os.environ.get("RANK", "0") == "0":
            print(f"{', '.join(ignored)}: without effect, as the model file has {name}()", file=sys.stderr)
    options.lr = LEARNING_RATE if options.lr is None else options.lr
    if hasattr(model_file, "build_scheduler"):
        return
    if options.lr_schedule == "constant" and options.min_lr > 0.0:
        parser.error("argument --min-lr: does nothing without --lr-schedule cosine or linear")
    if not hasattr(model_file, "build_optimizer") and options.min_lr > options.lr:
        parser.error(f"argument --min-lr: found {options.min_lr:g}, expected at most --lr {options.lr:g}")


def _ignored(options: Namespace, model_file: Any) -> Iterator[tuple[str, list[str]]]:
    """The functions of a model file, each with the options that were given and that it replaces."""
    schedule = {
        "--lr-schedule": options.lr_schedule != "constant",
        "--warmup-steps": options.warmup_steps != 0,
        "--min-lr": options.min_lr != 0.0,
    }
    for name, given in {"build_optimizer": {"--lr": options.lr is not None}, "build_scheduler": schedule}.items():
        ignored = [option for option, is_given in given.items() if is_given]
        if ignored and hasattr(model_file, name):
            yield name, ignored


def build_scheduler_of(model_file: Any, optimizer: torch.optim.Optimizer, rate: LearningRate | None) -> Any | None:
    """The scheduler of the model file, or of `rate`; None where the rate never changes.

    Raises: LearningRateError when the smallest rate is above the optimizer's own, or the model file's function returns
        no scheduler.
    """
    if rate is None:
        return None
    build_scheduler = getattr(model_file, "build_scheduler", None)
    if build_scheduler is not None:
        return _checked(build_scheduler(optimizer, rate.n_steps))
    if rate.curve == "constant" and rate.warmup_steps == 0:
        return None
    return LambdaLR(optimizer, [_factor(rate, float(group["lr"])) for group in optimizer.param_groups])


def _checked(scheduler: Any) -> Any:
    if hasattr(scheduler, "step") and hasattr(scheduler, "state_dict"):
        return scheduler
    found = "None" if scheduler is None else f"a {type(scheduler).__name__}"
    raise LearningRateError(
        f"build_scheduler: found {found}\n  expected: a scheduler, such as one of torch.optim.lr_scheduler\n"
        "  fix: end it by `return scheduler`; without build_scheduler the rate is that of --lr-schedule"
    )


def step_scheduler(scheduler: Any, loss: torch.Tensor) -> None:
    """After an update, in a step of that loss."""
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(loss.item())
    else:
        scheduler.step()


def load_scheduler(scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Go on from a state that was written as JSON, whose keys are all text, as those of milestones are not."""
    scheduler.load_state_dict(_with_keys_of(saved, scheduler.state_dict()))


def _with_keys_of(saved: Any, current: Any) -> Any:
    """A state read from JSON, with numbers for keys wherever the current one has them."""
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        are_numbers = bool(current) and all(isinstance(key, int) for key in current)
        found = {int(key) if are_numbers else key: value for key, value in saved.items()}
        found = {key: _with_keys_of(value, current.get(key)) for key, value in found.items()}
        return type(current)(found)  # type: ignore[call-arg]
    if isinstance(saved, list) and isinstance(current, list) and len(saved) == len(current):
        return [_with_keys_of(*pair) for pair in zip(saved, current, strict=True)]
    return saved


def _factor(rate: LearningRate, largest: float) -> Callable[[int], float]:
    if rate.curve != "constant" and rate.smallest > largest:
        raise LearningRateError(f"--min-lr: found {rate.smallest:g}, expected at most the optimizer's own {largest:g}")
    return lambda step: rate.at(step, largest=largest) / largest if largest > 0.0 else 1.0
