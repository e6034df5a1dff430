"""How long the search takes, and how far it proves its plan, on transformers priced by a rough roofline.

    PYTHONPATH=. python benchmarks/search_speed.py [TIME_LIMIT_S]

Prints one line per case: devices, meshes, how many were priced, seconds, step time, gap. The prices are invented
(300 TFLOP/s, 250 GB/s within a host of 8 devices, 40 GB/s beyond) and only their shape matters.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from autoplan.cost.table import CostTable, SegmentCost
from autoplan.options import Options
from autoplan.parallel_plan import Mesh, Plan
from autoplan.search import SearchSpace, search
from autoplan.units import GB, GiB

SEQUENCE, VOCABULARY = 4096, 32000
FLOPS_PER_S, BYTES_PER_S = 300e12, 1.5e12
HOST_BYTES_PER_S, NETWORK_BYTES_PER_S = 250 * GB, 40 * GB


@dataclass(frozen=True, slots=True)
class Transformer:
    """Embedding, `n_layers` equal layers, head."""

    n_layers: int
    hidden: int

    @property
    def kinds(self) -> tuple[int, ...]:
        return (0, *(1,) * self.n_layers, 2)

    def price(self, mesh: Mesh) -> CostTable:
        h = self.hidden
        weights = (VOCABULARY * h, 12 * h * h, VOCABULARY * h)
        flops = (0, 24 * h * h * SEQUENCE + 4 * SEQUENCE * SEQUENCE * h, 2 * VOCABULARY * h * SEQUENCE)
        saved = (2 * SEQUENCE * h, 34 * SEQUENCE * h, 6 * SEQUENCE * VOCABULARY)
        activation_bytes = 2 * SEQUENCE * h * mesh.micro_batch_size
        parts = zip(weights, flops, saved, strict=True)
        n_cuts = self.n_layers + 1
        return CostTable(
            mesh=mesh,
            kinds=self.kinds,
            recompute_choices=("none", "full"),
            costs=tuple(
                tuple(_cost(mesh, *part, activation_bytes, again) for again in (False, True)) for part in parts
            ),
            cut_s=(activation_bytes / mesh.tp / NETWORK_BYTES_PER_S,) * n_cuts,
            cut_bytes=(activation_bytes // mesh.tp,) * n_cuts,
            gathers_per_micro_batch=mesh.zero_stage == 3,
            reduces_per_micro_batch=mesh.zero_stage >= 2 and mesh.pp == 1,
            keeps_gathered=mesh.zero_stage in (1, 2),
            overlap_slowdown=1.3,
            per_step_s=1e-3,
            reserved_fixed_bytes=2 * GiB,
            reserved_ratio=1.05,
            memory_limit_bytes=80 * GiB,
        )


def _cost(
    mesh: Mesh, n_weights: int, n_flops: int, saved_bytes: int, activation_bytes: int, again: bool
) -> SegmentCost:
    tp, size, shard = mesh.tp, mesh.micro_batch_size, mesh.zero_shard_degree
    group = HOST_BYTES_PER_S if mesh.dp * tp <= 8 else NETWORK_BYTES_PER_S
    weight_bytes = 2 * n_weights // tp
    forward_s = n_flops * size / tp / FLOPS_PER_S
    tp_s = 0.0 if tp == 1 else 2 * activation_bytes * (tp - 1) / tp / HOST_BYTES_PER_S
    kept = {0: 16, 1: 4 + 12 / shard, 2: 2 + 14 / shard, 3: 16 / shard}[mesh.zero_stage]
    return SegmentCost(
        forward_s=forward_s,
        backward_s=2 * forward_s,
        recompute_s=forward_s + tp_s if again else 0.0,
        launch_forward_s=0.0,
        launch_backward_s=0.0,
        tp_forward_s=tp_s,
        tp_backward_s=tp_s,
        gather_s=weight_bytes / group if mesh.zero_stage else 0.0,
        reduce_s=2 * weight_bytes / group if mesh.dp > 1 else 0.0,
        optimizer_s=16 * n_weights / tp / shard / BYTES_PER_S,
        state_bytes=int(kept * n_weights / tp),
        gathered_bytes=weight_bytes if mesh.zero_stage == 3 else 0,
        gradient_bytes=weight_bytes if mesh.zero_stage >= 2 else 0,
        saved_bytes=activation_bytes if again else saved_bytes * size // tp,
        working_bytes=saved_bytes * size // tp if again else 0,
    )


def main() -> None:
    time_limit_s = float(sys.argv[1]) if len(sys.argv) > 1 else None
    print("layers hidden devices  meshes  priced  seconds   step_s     gap")
    for n_layers, hidden, n_devices, batch in ((32, 4096, 8, 256), (32, 4096, 64, 512), (80, 8192, 64, 512)):
        model = Transformer(n_layers, hidden)
        space = SearchSpace(
            n_devices=n_devices,
            n_devices_per_host=8,
            global_batch=batch,
            kinds=model.kinds,
            cuts=(True,) * (n_layers + 1),
            shardings=((1, ("",)), (2, ("a",)), (4, ("a",)), (8, ("a",))),
        )
        priced: list[Mesh] = []

        def price(mesh: Mesh, model: Transformer = model, priced: list[Mesh] = priced) -> CostTable:
            priced.append(mesh)
            return model.price(mesh)

        result = search(space, price=price, options=Options(time_limit_s=time_limit_s), make_plan=Plan)
        step_s = "-" if result.best is None else f"{result.best.estimate.step_s:.3f}"
        gap = "-" if result.gap is None else f"{result.gap:.2%}"
        counts = f"{result.n_meshes:7} {len(priced):7} {result.search_s:8.1f}"
        print(f"{n_layers:6} {hidden:6} {n_devices:7} {counts} {step_s:>8} {gap:>7}", flush=True)


if __name__ == "__main__":
    main()
