"""What the host adds to the device's time, per segment: in eager mode it launches every kernel, in the order they run.

    forward   device ====    ====    ====   waits where the host is slower; such a wait comes with every micro-batch
    host           - - - - - - - - - -

What the host has to do in one pass of a step only (gather, reduce, the optimizer) hides in the lead it has by then: at
the first forward pass it has none, at the last backward pass what it won in the passes before.

Passes that are a CUDA graph are launched at once. What is left for the host is the optimizer, and hides in all of them:

    device  ==========passes==========|  waits  |=optimizer=
    host    ----optimizer, parameter by parameter----
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of one forward and one backward pass."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class Launch:
    """What the host adds: to every forward and backward pass, and once per step."""

    forward_s: float
    backward_s: float
    once_s: float


def lead_s(host_s: float, device_s: float) -> float:
    """By how much the host is ahead after a pass; it can spend as much on what it does between the passes."""
    return max(0.0, device_s - host_s)


def launch(host: PassSeconds, device: PassSeconds, *, first_s: float, last_s: float, repeats: bool) -> Launch:
    """Of one segment; `first_s` and `last_s` are the host's, in the first forward and after the last backward pass.

    `repeats`: there are several micro-batches. One of those before the last is enough to win a lead.
    """
    forward_s = max(0.0, host.forward_s - device.forward_s)
    backward_s = max(0.0, host.backward_s - device.backward_s)
    waits_first_s = max(0.0, host.forward_s + first_s - device.forward_s) - forward_s
    lead_s = max(0.0, device.forward_s - host.forward_s - (0.0 if repeats else first_s))
    if repeats:
        lead_s += max(0.0, device.forward_s + device.backward_s - host.forward_s - host.backward_s)
    waits_last_s = max(0.0, host.backward_s + last_s - device.backward_s - lead_s)
    return Launch(forward_s, backward_s, waits_first_s + max(0.0, waits_last_s - backward_s))


def late_share(host_s: float, device_s: float) -> float:
    """The part of `host_s` that is left when the device is done, if both begin at once and it takes `device_s`."""
    return max(0.0, 1.0 - device_s / host_s) if host_s else 0.0
