"""Whether any plan is likely to fit, by a glance at the meshes that need little memory. It proves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoplan.options import Options
from autoplan.parallel_plan import Mesh
from autoplan.search.bounds import shortfall_bytes
from autoplan.search.meshes import Price, SearchSpace, degrees_of, device_counts, meshes_of, micro_batch_sizes


def seems_hopeless(space: SearchSpace, options: Options, *, price: Price) -> bool:
    """Whether all of `thrifty_meshes` lack memory by arithmetic; not where there are none."""
    n_short = 0
    for mesh in thrifty_meshes(space, options):
        if shortfall_bytes(price(mesh)) <= 0:
            return False
        n_short += 1
    return n_short > 0


def thrifty_meshes(space: SearchSpace, options: Options) -> Iterator[Mesh]:
    """Per degrees of tensor and pipeline parallelism those with most data-parallel ranks, the smallest micro-batch and
    the most shards; those that divide the model most come first.
    """
    most: dict[tuple[int, int], int] = {}
    for n_devices in device_counts(space):
        for tp, pp, dp in degrees_of(space, options, n_devices=n_devices):
            most[tp, pp] = max(dp, most.get((tp, pp), 0))
    for tp, pp in sorted(most, reverse=True):
        yield from _of_degrees(space, options, tp=tp, pp=pp, dp=most[tp, pp])


def _of_degrees(space: SearchSpace, options: Options, *, tp: int, pp: int, dp: int) -> Iterator[Mesh]:
    for size in micro_batch_sizes(space, options, dp=dp)[:1]:
        smallest = replace(options, max_micro_batch_size=size)
        meshes = list(meshes_of(space, smallest, tp=tp, pp=pp, dp=dp))
        most = max(map(_thrift, meshes), default=None)
        yield from (mesh for mesh in meshes if _thrift(mesh) == most)


def _thrift(mesh: Mesh) -> tuple[int, ...]:
    return mesh.schedule == "1f1b", mesh.zero_stage, mesh.zero_shard_degree
