"""autoplan: which parallelism trains this model fastest on that cluster, and the program that does it.

    import autoplan
    result = autoplan.plan("model.py", hw="dgx_a100_x8", global_batch=512)
    print(result.status, result.best.plan.mesh, result.best.estimate.step_s)

Where things are, along the data flow:

    values      options, graph, layout, rules, equations, overlap, parallel_plan (`Mesh`, `Plan`, `Estimate`), answers
    trace       tracing: a model -> OpGraph     analysis: what follows from it     hardware: a cluster as numbers
    price       tensor_parallel: layouts of values -> cost: times and bytes -> space: what the search is called with
    search      search, by solver and schedules     simulator: the judge of every plan
    generate    codegen: the program     runtime: what it runs on     output: its folder     interop: other programs
    measure     measure_hardware: a machine -> hardware profile
                measure_model: a model's segments -> measured_profile, by its measuring_program
    ask         planning: names -> answer, after checks     what_if: other clusters     api, live: the library
    show        report: text     html_report: pages     cli: the command line     doctor: this machine

Below them errors, units, files, registry (tables of extension files), json_values, plain_text (tables, counted
nouns), plan_words (a plan in words), user_cache, user_errors, processes and garbage.

Names load on first use: importing autoplan imports neither torch nor the solver.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoplan.answers.answer import Answer
    from autoplan.api import emit, estimate, plan, whatif
    from autoplan.errors import AutoplanError
    from autoplan.hardware import hardware_names, load_hardware_profile
    from autoplan.live import parallelize, trace
    from autoplan.options import Options
    from autoplan.output.folder import read_answer
    from autoplan.parallel_plan import Estimate, Mesh, Plan
    from autoplan.planning.questions import asked_again, sensitivity, why_not
    from autoplan.search.result import SearchResult
    from autoplan.what_if.advising import advise
    from autoplan.what_if.question import Question, read_question
    from autoplan.what_if.recommending import recommend

__version__ = "0.1.0"

# In a checkout, cost_models/ and hardware_profiles/ stand beside this package; once installed, inside it.
if not (Path(__file__).parent / "cost_models").exists():
    __path__.append(str(Path(__file__).parent.parent))

_HOME = {
    "Answer": "autoplan.answers.answer",
    "AutoplanError": "autoplan.errors",
    "Estimate": "autoplan.parallel_plan",
    "Mesh": "autoplan.parallel_plan",
    "Options": "autoplan.options",
    "Plan": "autoplan.parallel_plan",
    "Question": "autoplan.what_if.question",
    "SearchResult": "autoplan.search.result",
    "advise": "autoplan.what_if.advising",
    "asked_again": "autoplan.planning.questions",
    "emit": "autoplan.api",
    "estimate": "autoplan.api",
    "hardware_names": "autoplan.hardware",
    "load_hardware_profile": "autoplan.hardware",
    "parallelize": "autoplan.live",
    "plan": "autoplan.api",
    "read_answer": "autoplan.output.folder",
    "read_question": "autoplan.what_if.question",
    "recommend": "autoplan.what_if.recommending",
    "sensitivity": "autoplan.planning.questions",
    "trace": "autoplan.live",
    "whatif": "autoplan.api",
    "why_not": "autoplan.planning.questions",
}

__all__ = [
    "Answer",
    "AutoplanError",
    "Estimate",
    "Mesh",
    "Options",
    "Plan",
    "Question",
    "SearchResult",
    "advise",
    "asked_again",
    "emit",
    "estimate",
    "hardware_names",
    "load_hardware_profile",
    "parallelize",
    "plan",
    "read_answer",
    "read_question",
    "recommend",
    "sensitivity",
    "trace",
    "whatif",
    "why_not",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autoplan' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
