"""What is measured in these tests, and rows and plans of it."""

from __future__ import annotations

from pathlib import Path

from autoplan.parallel_plan import Mesh, Plan, StagePlan
from autoplan.processes import start_process
from autoplan.space.priced import price_plan

CHECKOUT = Path(__file__).parent.parent.parent
GPT, MLP = CHECKOUT / "examples" / "gpt.py", CHECKOUT / "examples" / "mlp.py"
SIZES = {"n_layers": 2, "n_heads": 4, "width": 32, "context": 16}
DEGREES, BATCHES = (1, 2), (1, 2)


def quick(command):
    return start_process([*command, "--seconds", "0.005", "--backend", "aot_eager"])


def segment_rows(rows, **wanted):
    """Those with these values; eager ones and generated code, unless `compiled` and `module` are among them."""
    wanted = {"compiled": False, "module": "generated"} | wanted
    return [r for r in rows if r["what"] == "segment" and all(r[key] == value for key, value in wanted.items())]


def rows_of_one_stage(rows, segment, **wanted):
    """Those that plans without tensor and pipeline parallelism take."""
    return segment_rows(rows, segment=segment.name, tp=1, module="own" if segment.is_block else "generated", **wanted)


def whole_plan(problem, size=1, **mesh):
    return Plan(Mesh(micro_batch_size=size, **mesh), (StagePlan(0, len(problem.graph.segments)),), precision="fp32")


def tables(problem, size=1):
    """(priced as measured, priced by the hardware profile) on one device."""
    plan = whole_plan(problem, size)
    both = (problem.measured, None)
    return tuple(price_plan(problem.graph, problem.hardware, plan, measured=measured) for measured in both)
