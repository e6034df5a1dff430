"""The choices of a plan that are not plain, in words for tables and lines."""

from __future__ import annotations

from autoplan.parallel_plan import Execution, Mesh, Plan


def choice_words(plan: Plan) -> tuple[str, ...]:
    """All of them, in a word each."""
    loss = ["chunked"] * (plan.loss == "chunked")
    gradients = [f"grads {_how(plan)}"] * (plan.grad_compression != "none")
    return (*execution_words(plan.mesh), *loss, *gradients)


def choice_rows(plan: Plan) -> list[tuple[str, str]]:
    """Those that have a row of their own: (what, how)."""
    loss = [("loss", "chunked: in slices of its rows")] * (plan.loss == "chunked")
    gradients = [("gradients", f"reduced {_how(plan)}")] * (plan.grad_compression != "none")
    return [*loss, *gradients]


def _how(plan: Plan) -> str:
    if plan.grad_compression == "powersgd":
        return f"by PowerSGD of rank {plan.powersgd_rank}"
    return f"in {plan.grad_compression}"


def execution_words(mesh: Mesh) -> tuple[str, ...]:
    """What is not plain about how modules run."""
    is_plain = mesh.memory_format == Execution().memory_format
    formats = [] if is_plain else [mesh.memory_format]
    return (*(["compiled"] * mesh.compile), *formats, *(["generated"] * mesh.generated))
