"""The batch of a step on its way to a device: how long the copy takes, and what lies on the device meanwhile.

    step            | step k            | step k + 1        |       every rank copies all samples of its dp rank, in the
    copy            | batch k + 1 --->  | batch k + 2 --->  |       precision of the dataset, beside the step before

A step is never shorter than the copy of the batch after it (`CostTable.batch_copy_s`); only the first batch of a run is
waited for. On the device are the batch of the step, the next one, a CUDA graph's own, to which the first one is copied,
and the first one again in the precision of the model where that differs. Left out: reading and decoding samples, which
`data_wait_s` of a run tells, and that the ops of the first segment keep some of the last of these, too.
"""

from __future__ import annotations

from collections.abc import Callable

from autoplan.graph import COMPUTE, COMPUTE_DTYPES, OpGraph
from autoplan.hardware import Device
from autoplan.parallel_plan import Mesh

DATASET_PRECISION = "fp32"  # in which datasets give what is floating point; torch's default

BatchPricer = Callable[[Mesh], tuple[float, int]]  # seconds to copy one, bytes of all that a device has


def make_batch_pricer(graph: OpGraph, device: Device, precision: str) -> BatchPricer:
    """Of a mesh on such devices."""
    specs = [item.spec for item in graph.inputs]
    is_cast = COMPUTE_DTYPES[precision] != COMPUTE_DTYPES[DATASET_PRECISION]
    cast = [spec for spec in specs if spec.dtype == COMPUTE] if is_cast else []
    rate = device.host_copy_bytes_per_s

    def price(mesh: Mesh) -> tuple[float, int]:
        n_samples = mesh.micro_batch_size * mesh.n_micro_batches
        copied = sum(spec.n_bytes(n_samples, DATASET_PRECISION) for spec in specs)
        held = (2 + mesh.cuda_graph) * copied + sum(spec.n_bytes(n_samples, precision) for spec in cast)
        return 0.0 if rate is None else copied / rate, held

    return price
