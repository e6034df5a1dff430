"""Predicted against published: 209 runs of MPT models under FSDP, from the data sheet alone; nothing is fitted to them.

    python benchmarks/published_fsdp.py [RESULTS.jsonl]    errors, rank correlation, intervals, worst rows

The rows of `data/published_fsdp_steps.csv` are the tables of mosaicml/llm-foundry scripts/train/benchmarking/README.md
@8c8dd48: 125 million to 65 billion parameters, 512 to 65,536 tokens, 8 to 512 devices. The sizes are those of
scripts/train/yamls/pretrain there; with biases and learned positions they give the published counts of parameters, so
`examples/gpt.py` is that model. FULL_SHARD is ZeRO 3 and SHARD_GRAD_OP is ZeRO 2, activation checkpointing recomputes
all blocks, and PURE reduces gradients in bf16. Their loss was one fused kernel on 16-bit logits; the chunked loss,
which never holds them whole, is the nearest to that. They ran torch 1.13 to 2.1 with the FSDP and the flash attention
of then, which uses less of an H100 than of an A100. Rows in 8-bit floats are left out: no plan has them.
"""

import csv
import json
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

from published import HEAD, Case, Prediction, Program, by_source, described, summary, worst

from autoplan import api
from autoplan.answers.answer import step_interval_s
from autoplan.hardware import load_hardware_profile
from autoplan.options import Options
from autoplan.parallel_plan import Mesh, Plan, StagePlan
from autoplan.planning.problem import Problem

FOLDER = Path(__file__).parent
ROWS = FOLDER / "data" / "published_fsdp_steps.csv"
MODEL = FOLDER.parent / "examples" / "gpt.py"
LONG = 8192  # tokens: beyond, attention is most of the step
HARDWARE = {"h100_80gb": "dgx_h100_x8", "a100_80gb": "dgx_a100_x8", "a100_40gb": "dgx_a100_40g_x8"}
ZERO_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}
REDUCED_IN = {"DEFAULT": "none", "PURE": "bf16"}  # `Plan.grad_compression`

Row = Mapping[str, str]


def rows() -> list[Row]:
    found = csv.DictReader(ROWS.read_text().splitlines())
    return [row for row in found if row["precision"] != "amp_fp8"]


def case_of(row: Row) -> Case:
    """The model and the mesh of a row."""
    names = {"n_layers": "layers", "n_heads": "heads", "width": "hidden", "vocabulary": "vocab", "context": "seq_len"}
    sizes = tuple((name, int(row[column])) for name, column in names.items())
    n_devices, micro_batch, global_batch = int(row["gpus"]), int(row["micro_batch"]), int(row["global_batch"])
    mesh = Mesh(
        dp=n_devices,
        zero_stage=ZERO_STAGES[row["sharding"]],
        zero_shard_degree=n_devices,
        micro_batch_size=micro_batch,
        n_micro_batches=global_batch // micro_batch // n_devices,
    )
    return Case(
        name=f"{row['seq_len']} x{n_devices} {row['sharding'].lower()} {row['mixed_precision'].lower()}",
        source=f"{row['gpu']}, {'more than' if int(row['seq_len']) > LONG else 'up to'} {LONG:,} tokens",
        model=row["model"],
        program=Program(sizes, HARDWARE[row["gpu"]], "bf16", tp=1, sharding=""),
        mesh=mesh,
        recompute="full" if row["activation_checkpointing"] == "True" else "none",
        measured_s=global_batch * int(row["seq_len"]) / float(row["tokens_per_s"]),
    )


@cache
def problem_of(program: Program, n_devices: int, global_batch: int) -> Problem:
    n_hosts = n_devices // load_hardware_profile(program.hardware).n_devices
    options = Options(global_batch=global_batch)
    made = api.make_problem(MODEL, hw=program.hardware, hosts=n_hosts, overrides=dict(program.sizes), options=options)
    device = replace(made.hardware.device, attention="flash")  # torch took cuDNN's from 2.5 on
    return replace(made, hardware=replace(made.hardware, device=device))


def predicted(case: Case, *, reduced_in: str) -> tuple[Prediction, bool]:
    """The step, and whether its memory fits, as that of each published run did."""
    problem = problem_of(case.program, case.mesh.n_devices, case.mesh.global_batch_size)
    last = len(problem.graph.segments) - 1
    again = tuple(range(1, last)) if case.recompute == "full" else ()
    plan = Plan(
        case.mesh,
        (StagePlan(0, last + 1, again),),
        hardware=case.program.hardware,
        n_hosts=problem.hardware.n_hosts,
        recompute=case.recompute,
        loss="chunked",
        grad_compression=reduced_in,
    )
    best = api.score(problem, plan).result.best
    assert best is not None
    breakdown = best.estimate.breakdown
    parts_s = {field.name: getattr(breakdown, field.name) for field in fields(breakdown)}
    return Prediction(case, best.estimate.step_s, step_interval_s(best), parts_s), best.estimate.fits


def main(results: Path | None = None) -> None:
    found = [predicted(case_of(row), reduced_in=REDUCED_IN[row["mixed_precision"]]) for row in rows()]
    for source, own in by_source(prediction for prediction, _ in found).items():
        n_fit = sum(fits for prediction, fits in found if prediction.case.source == source)
        print(f"{source}; {n_fit} of {len(own)} predicted to fit\n{HEAD}\n{summary(own)}")
        for prediction in worst(own):
            print(described(prediction))
    if results is not None:
        results.write_text("".join(json.dumps(_result(*pair)) + "\n" for pair in found))


def _result(prediction: Prediction, fits: bool) -> dict[str, object]:
    case = prediction.case
    return {
        "source": case.source,
        "case": f"{case.model} {case.name}",
        "micro_batch": case.mesh.micro_batch_size,
        "recompute": case.recompute,
        "measured_step_s": round(case.measured_s, 5),
        "predicted_step_s": round(prediction.step_s, 5),
        "predicted_step_s_interval": [round(bound_s, 5) for bound_s in prediction.interval_s],
        "predicted_to_fit": fits,
    }


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
