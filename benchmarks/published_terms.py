"""Published runs that looked far off, term by term: Llama 2 of 7B to 70B under FSDP, and Mixtral 8x7B.

    python benchmarks/published_terms.py [RESULTS.jsonl]

Llama: `data/published_llama_steps.csv`, of foundation-model-stack/fms-fsdp README.md @5e522b4 (eager) and @3b1ce15 (the
same compiled), 128 A100 with 400 Gbit/s a host and 96 H100 with 800. By main_training_llama.py and fms_fsdp/policies
there, gradients are reduced in bf16 and samples are 4,096 tokens; HYBRID_SHARD shards within a host. Selective
recomputation of 13B is taken as every other block, from HFU / MFU. Each is priced both ways; the terms are of eager.

Mixtral: NVIDIA/Megatron-LM megatron/core/transformer/moe/README.md @8a71e3b, bf16, 64 H100, tp 1, ep 8, pp 4, 8 chunks,
micro-batch 1, global batch 256, 468 TFLOP/s (438 in @7f22e21), by `num_floating_point_operations` of its training.py,
which counts all of attention. Experts over data-parallel ranks are no plan here: priced is ZeRO 3 instead.

    step = products + other + recompute + exposed + rest
    products    model FLOPs (half of attention) at the sustained rate of products
    other       what else computes: element-wise operators, attention below that rate, casts and copies of parameters
"""

import csv
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from autoplan import api
from autoplan.analysis.model_flops import flops_per_sample
from autoplan.options import Options
from autoplan.parallel_plan import Estimate, Mesh, Plan, StagePlan
from autoplan.planning.problem import Problem

FOLDER = Path(__file__).parent
ROWS = FOLDER / "data" / "published_llama_steps.csv"
LLAMA = str(FOLDER.parent / "examples" / "llama.py")
MIXTRAL = f"hf:{FOLDER / 'models' / 'mixtral_8x7b.json'}"
CLUSTERS = {"a100_80gb": "dgx_a100_x8+infiniband_100g", "h100_80gb": "dgx_h100_x8+infiniband_200g:4"}
N_PER_HOST = 8
MIXTRAL_BATCH, MIXTRAL_CONTEXT, MIXTRAL_GPUS, MIXTRAL_FLOPS_PER_S = 256, 4096, 64, 468e12
# Per token: 12 layers width^2 (queries and output, keys and values, all of attention, 2 of the experts, head).
MIXTRAL_FLOPS = 12 * 32 * 4096**2 * (1 + 8 / 32 + 4096 / 4096 + 14336 / 4096 * 2 * 1.5 + 32000 / (2 * 32 * 4096))

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Found:
    """A published step, the same compiled where that was published too (measured, predicted), and what is predicted."""

    name: str
    measured_s: float
    compiled_s: tuple[float, float] | None
    products_s: float
    estimate: Estimate

    def terms_s(self) -> dict[str, float]:
        parts = self.estimate.breakdown
        found = {
            "products": self.products_s,
            "other": parts.compute_s - self.products_s,
            "recompute": parts.recompute_s,
            "exposed": parts.exposed_dp_s,
        }
        return found | {"rest": self.estimate.step_s - sum(found.values())}


def rows() -> list[Row]:
    return list(csv.DictReader(ROWS.read_text().splitlines()))


@cache
def _problem(model: str, hw: str, n_hosts: int, batch: int, sizes: tuple[tuple[str, object], ...]) -> Problem:
    return api.make_problem(model, hw=hw, hosts=n_hosts, overrides=dict(sizes), options=Options(global_batch=batch))


def _estimate(problem: Problem, mesh: Mesh, *, recomputed: float, reduced_in: str) -> Estimate:
    """With this share of the blocks recomputed."""
    last = len(problem.graph.segments) - 1
    again = tuple(range(1, last, round(1 / recomputed))) if recomputed else ()
    word = {0.0: "none", 1.0: "full"}.get(recomputed, "selective")
    hardware = problem.hardware
    stages = (StagePlan(0, last + 1, again),)
    plan = Plan(
        mesh, stages, hardware=hardware.name, n_hosts=hardware.n_hosts, recompute=word, grad_compression=reduced_in
    )
    best = api.score(problem, plan).result.best
    assert best is not None
    return best.estimate


def _products_s(problem: Problem, n_samples: float) -> float:
    device = problem.hardware.device
    rate = dict(device.peak_flops_per_s)["bf16"] * device.matmul_efficiency
    return flops_per_sample(problem.graph) * n_samples / rate


def llama(row: Row) -> Found:
    """A run of Llama 2."""
    names = {"n_layers": "layers", "n_heads": "heads", "n_kv_heads": "kv_heads", "width": "hidden"}
    names |= {"hidden": "ffn_hidden", "vocabulary": "vocab", "context": "seq_len"}
    sizes = (("size", row["size"]), *((name, int(row[column])) for name, column in names.items()))
    dp, size = int(row["gpus"]), int(row["micro_batch"])
    is_hybrid = row["sharding"] == "HYBRID_SHARD"
    mesh = Mesh(dp=dp, zero_stage=3, zero_shard_degree=N_PER_HOST if is_hybrid else dp, micro_batch_size=size)
    problem = _problem(LLAMA, CLUSTERS[row["gpu"]], dp // N_PER_HOST, mesh.global_batch_size, sizes)
    # no plan reduces hybrid shards in 16 bits
    reduced_in = "none" if is_hybrid else "bf16"
    estimate, compiled = (
        _estimate(problem, way, recomputed=float(row["recomputed_blocks"]), reduced_in=reduced_in)
        for way in (mesh, replace(mesh, compile=True))
    )
    n_tokens = size * int(row["seq_len"])
    eager_s, compiled_s = (n_tokens / float(row[f"{how}tokens_per_s_per_gpu"]) for how in ("", "compiled_"))
    name, both_s = f"{row['model']}, {row['gpu'][:4]}", (compiled_s, compiled.step_s)
    return Found(name, eager_s, both_s, _products_s(problem, size), estimate)


def mixtral() -> Found:
    """The published run of Mixtral, beside the plan here that is nearest to it and fits."""
    per_rank = MIXTRAL_BATCH // MIXTRAL_GPUS
    mesh = Mesh(dp=MIXTRAL_GPUS, zero_stage=3, zero_shard_degree=MIXTRAL_GPUS, micro_batch_size=per_rank)
    sizes = (("context", MIXTRAL_CONTEXT),)
    problem = _problem(MIXTRAL, "dgx_h100_x8", MIXTRAL_GPUS // N_PER_HOST, MIXTRAL_BATCH, sizes)
    estimate = _estimate(problem, mesh, recomputed=1.0, reduced_in="none")
    n_tokens = per_rank * MIXTRAL_CONTEXT
    measured_s = MIXTRAL_FLOPS * n_tokens / MIXTRAL_FLOPS_PER_S
    return Found("Mixtral 8x7B, h100", measured_s, None, _products_s(problem, per_rank), estimate)


def every_run() -> Iterator[Found]:
    yield from map(llama, rows())
    yield mixtral()


def main(results: Path | None = None) -> None:
    terms = ("products", "other", "recompute", "exposed", "rest")
    print(
        f"{'':20}{'measured':>9}{'predicted':>10}{'error':>8}{'compiled':>9}{'pred.':>7}{'error':>8}"
        + "".join(f"{t:>10}" for t in terms)
    )
    lines = []
    for found in every_run():
        step_s, terms_s = found.estimate.step_s, found.terms_s()
        cells = f"{found.measured_s:9.2f}{step_s:10.2f}{step_s / found.measured_s - 1:+8.1%}"
        if found.compiled_s is None:
            cells += f"{'-':>9}{'-':>7}{'-':>8}"
        else:
            measured_s, predicted_s = found.compiled_s
            cells += f"{measured_s:9.2f}{predicted_s:7.2f}{predicted_s / measured_s - 1:+8.1%}"
        print(f"{found.name:20}{cells}" + "".join(f"{terms_s[term]:10.2f}" for term in terms), flush=True)
        row = {
            "name": found.name,
            "measured_s": found.measured_s,
            "compiled_s": found.compiled_s and found.compiled_s[0],
            "predicted_s": step_s,
            "predicted_compiled_s": found.compiled_s and found.compiled_s[1],
        }
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        lines.append(json.dumps(rounded | {"terms_s": {key: round(value, 4) for key, value in terms_s.items()}}) + "\n")
    if results is not None:
        results.write_text("".join(lines))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
