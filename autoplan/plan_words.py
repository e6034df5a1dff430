"""The choices of a plan that are not plain, in words for tables and lines."""

from __future__ import annotations

from autoplan.parallel_plan import Execution, Mesh, Plan


def choice_words(plan: Plan) -> tuple[str, ...]:
    """All of them, in a word each."""
    loss = ["chunked"] * (plan.loss == "chunked")
    gradients = [f"grads {gradients_text(plan)}"] * (plan.grad_compression != "none")
    return (*execution_words(plan.mesh), *loss, *gradients)


def choice_rows(plan: Plan) -> list[tuple[str, str]]:
    """Those that have a row of their own: (what, how)."""
    loss = [("loss", "chunked: in slices of its rows")] * (plan.loss == "chunked")
    gradients = [("gradients", f"reduced in {gradients_text(plan)}")] * (plan.grad_compression != "none")
    return [*loss, *gradients]


def gradients_text(plan: Plan) -> str:
    """How gradients are compressed: `bf16`, or `PowerSGD 4` with the rank."""
    return f"PowerSGD {plan.powersgd_rank}" if plan.grad_compression == "powersgd" else plan.grad_compression


def execution_words(mesh: Mesh) -> tuple[str, ...]:
    """What is not plain about how modules run."""
    is_plain = mesh.memory_format == Execution().memory_format
    return (*(["compiled"] * mesh.compile), *([] if is_plain else [mesh.memory_format]))
