"""What a device waits for in front of collectives, of copies from the host's memory, and of a step, whatever these are.

    step   | the host begins |  kernels, with waits in front of some  |  optimizer  |

Traces of CUDA graphs of BERT-large, ViT-L and ResNet-152 on two H100 with torch 2.11
(benchmarks/results/graph_kernels_h100_x2_2026-11-26.txt). Taken for all devices, and for steps whose kernels are
launched one by one, too, which are never faster: a graph adds no time. Other intervals between the kernels of a
segment, 0.4 us in a graph, are part of its time where it was measured, and left out where it was not.
"""

from __future__ import annotations

from autoplan.hardware import Device

# From the end of a kernel to the start of a collective that needs it.
COLLECTIVE_WAIT_S = 5e-6
# `fully_shard` copies the addresses of a group's tensors to the device before it puts what was gathered in its place,
# or gradients together: 4 to 6 us, and 5 to 15 us around it.
ADDRESSES_S = 15e-6
# After a step the host waits for the device, to know whether it was finite. Then it copies a batch to the graph's own,
# agrees with the other ranks and launches it: 0.2 ms until it does on one device with launches of 7 us, 0.4 to 0.7 ms
# on two (benchmarks/results/replay_starts_h100_2026-11-26.txt, replay_starts_h200_x2_2026-11-26.txt), and 0.2 ms more
# until the first kernel starts. Left out: what agreeing takes longer over more ranks and over hosts.
START_LAUNCHES = 60
AGREEMENT_S = 4e-4


def start_s(device: Device, *, n_devices: int) -> float:
    """From the end of a step to the first kernel of the next one."""
    return START_LAUNCHES * device.launch_s + (AGREEMENT_S if n_devices > 1 else 0.0)
