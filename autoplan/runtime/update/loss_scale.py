"""The loss scale of float16: a factor on the loss that keeps small gradients from becoming zero.

    step   gradients finite on all ranks:   divide them by the scale, update; after `GROWTH_STEPS` such steps, double it
           otherwise:                       no update on any rank, halve the scale

Scales are powers of two, so scaling and unscaling change no bit of a gradient that neither overflows nor underflows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .finite import NotFiniteError

FIRST_SCALE = 2.0**16
SMALLEST_SCALE = 1.0
GROWTH_STEPS = 2000


@dataclass(slots=True)
class LossScale:
    """The scale of the coming step; equal on all ranks, because all see the same global norm.

    Attributes:
        n_good_steps: since the scale last changed.
    """

    value: float = FIRST_SCALE
    n_good_steps: int = 0

    def grow(self) -> None:
        """After a step whose gradients were finite."""
        self.n_good_steps += 1
        if self.n_good_steps == GROWTH_STEPS:
            self.value, self.n_good_steps = self.value * 2.0, 0

    def back_off(self) -> None:
        """After a step whose gradients were not finite.

        Raises: NotFiniteError when a smaller scale cannot help.
        """
        if self.value <= SMALLEST_SCALE:
            raise NotFiniteError(
                f"gradients are not finite even with a loss scale of {self.value:g}; expected: finite ones. "
                "No parameter was changed by this step.\n"
                "  fix: a smaller --lr, --clip 1.0, or --dtype bfloat16; look for inf or NaN in the data"
            )
        self.value, self.n_good_steps = self.value / 2.0, 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return asdict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go on from what `state_dict` returned."""
        self.value, self.n_good_steps = float(state_dict["value"]), int(state_dict["n_good_steps"])
