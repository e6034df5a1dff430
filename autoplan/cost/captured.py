"""What a device waits for in a CUDA graph beside its kernels, and before it.

    step   | the host begins |  graph: kernels, 0.4 us apart; collectives, and copies from the host's memory, further  |

Traces of BERT-large, ViT-L and ResNet-152 on two H100 with torch 2.11, taken for all devices
(benchmarks/results/graph_kernels_h100_x2_2026-11-26.txt). Intervals between the kernels of a segment are part of its
time where it was measured.
"""

from __future__ import annotations

from autoplan.hardware import Device

# From the end of a kernel to the start of a collective that needs it.
COLLECTIVE_WAIT_S = 5e-6
# `fully_shard` copies the addresses of a group's tensors to the device before it puts what was gathered in its place,
# or gradients together: 4 to 6 us, and 5 to 15 us around it.
ADDRESSES_S = 15e-6
# Between two steps the device waits until the host has copied a batch to the graph's own, agreed with the other ranks
# and launched it: 0.5 ms on one device with launches of 7 us, of which 0.2 ms until the first kernel starts.
START_LAUNCHES = 70
AGREEMENT_S = 3e-4


def start_s(device: Device, *, n_devices: int) -> float:
    """From the end of a step to the first kernel of the next one."""
    return START_LAUNCHES * device.launch_s + (AGREEMENT_S if n_devices > 1 else 0.0)
