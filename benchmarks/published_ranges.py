"""Published steps whose micro-batch was left out: the range of predictions over all that it may have been.

    python benchmarks/published_ranges.py [RESULTS.jsonl]

Rows of `data/` on H100 that say model, cluster and degrees, without a pipeline (its chunks were left out, too). Priced
from the data sheet, with nothing fitted to any H100, as the model of examples/gpt.py: fused attention, eager, nothing
recomputed. These programs ran tensor-parallel communication beside products of the same layer, which no plan here does,
so the range goes from all of it hidden to all of it exposed. Their sequences came before samples, so that nothing is
copied beside a collective. A row outside of the range is one that the data sheet gets wrong.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import published
import published_rows

from autoplan import api
from autoplan.hardware import load_hardware_profile
from autoplan.options import AS_COMPUTED, Options

MODEL = Path(__file__).parent.parent / "examples" / "gpt.py"
HARDWARE = {"H100-SXM-80GB": "dgx_h100_x8"}
REASON = "micro-batch, recomputation and chunks not published"


def rows() -> list[published_rows.Row]:
    return [
        row
        for row in published.rows()
        if row["gpu"] in HARDWARE and published.reason_against(row) == REASON and row["pp"] == "1" and row["dp"]
    ]


def predictions_s(row: published_rows.Row) -> Iterator[tuple[int, float, float]]:
    """(micro-batch, step with tensor-parallel communication hidden, step with it exposed) of each that fits."""
    dp, global_batch = int(row["dp"]), int(row["global_batch"])
    names = (("n_layers", "layers"), ("n_heads", "heads"), ("width", "hidden"))
    sizes = {"context": int(row["seq_len"]), "vocabulary": int(row["vocab"])} | {n: int(row[key]) for n, key in names}
    n_hosts = int(row["gpus"]) // load_hardware_profile(HARDWARE[row["gpu"]]).n_devices
    per_rank = global_batch // dp
    for micro_batch in (size for size in range(1, per_rank + 1) if per_rank % size == 0):
        fix = f"dp={dp},tp={row['tp']},pp=1,zero={row['zero_stage']},micro_batch={micro_batch}"
        fix += ",recompute=none,compile=off,cuda_graph=off"
        fixed = tuple(tuple(item.split("=")) for item in fix.split(","))
        options = Options(global_batch=global_batch, fix=fixed, memory_confidence=AS_COMPUTED)  # they ran
        problem = api.make_problem(MODEL, hw=HARDWARE[row["gpu"]], hosts=n_hosts, overrides=sizes, options=options)
        with published.nothing_copied():
            best = api.decide(problem).result.best
        if best is not None:
            step_s = best.estimate.step_s
            yield micro_batch, step_s - best.estimate.breakdown.exposed_tp_s, step_s


def result(row: published_rows.Row) -> dict[str, object]:
    found = list(predictions_s(row))
    measured_s, least_s, most_s = float(row["measured_step_s"]), min(f[1] for f in found), max(f[2] for f in found)
    return {
        "id": row["id"],
        "measured_step_s": measured_s,
        "predicted_step_s_range": [round(least_s, 4), round(most_s, 4)],
        "is_inside": least_s <= measured_s <= most_s,
        "predictions": [
            {"micro_batch": size, "tp_hidden_s": round(hidden_s, 4), "tp_exposed_s": round(exposed_s, 4)}
            for size, hidden_s, exposed_s in found
        ],
    }


def main(results: Path | None = None) -> None:
    print(f"{'':20}{'measured s':>11}{'predicted from':>15}{'to':>8}   by micro-batch")
    lines = []
    for row in rows():
        found = result(row)
        least_s, most_s = found["predicted_step_s_range"]
        each = ", ".join(
            f"{p['micro_batch']}: {p['tp_hidden_s']:.3f}-{p['tp_exposed_s']:.3f}" for p in found["predictions"]
        )
        outside = "" if found["is_inside"] else "   OUTSIDE"
        print(
            f"{found['id']:20}{found['measured_step_s']:11.3f}{least_s:15.3f}{most_s:8.3f}   {each}{outside}",
            flush=True,
        )
        lines.append(json.dumps(found) + "\n")
    if results is not None:
        results.write_text("".join(lines))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
