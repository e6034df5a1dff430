"""The choices of a plan that are not plain, in words for tables and lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.parallel_plan import Execution, Mesh, Plan


@dataclass(frozen=True, slots=True)
class Lanes:
    """What the parts of an estimate are of: pipeline ranks, or groups of hosts that share a batch unequally.

    Attributes:
        word: of one, where there is little room; `name` of one otherwise, before its number; `plural` of several.
        places: where each is, in words; empty where that goes without saying.
    """

    word: str = "rank"
    name: str = "pipeline rank"
    plural: str = "pipeline ranks"
    places: Sequence[str] = ()

    def of(self, index: int) -> str:
        """`pipeline rank 3`; `group 1 (32 data-parallel ranks on v100_x8)`."""
        return f"{self.name} {index}" + (f" ({self.places[index]})" if self.places else "")


PIPELINE = Lanes()


def lanes_of(plan: Plan) -> Lanes:
    """What the parts of the plan's estimate are of."""
    shares = plan.mesh.shares
    if not shares:
        return PIPELINE
    places = (f"{own.dp} data-parallel ranks on {at.hardware}" for own, at in zip(shares, plan.groups, strict=True))
    return Lanes("group", "group", "groups of hosts", tuple(places))


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


def dp_text(mesh: Mesh) -> str:
    """The data-parallel ranks, of each share of the batch: `64+32`."""
    return "+".join(str(share.dp) for share in mesh.all_shares)


def micro_batches_text(mesh: Mesh, times: str = "x") -> str:
    """Size and number of micro-batches of a rank, in each share of the batch: `1x16+1x5`."""
    texts = [f"{share.micro_batch_size}{times}{share.n_micro_batches}" for share in mesh.all_shares]
    return ("+" if times == "x" else " + ").join(texts)


def mesh_values(mesh: Mesh) -> dict[str, object]:
    """The fields of a mesh as values of a table; shares of the batch as `64+32: 1x7+1x2`, or nothing."""
    values = {name: getattr(mesh, name) for name in Mesh.__dataclass_fields__}
    return {**values, "shares": f"{dp_text(mesh)}: {micro_batches_text(mesh)}" if mesh.shares else ""}


def execution_words(mesh: Mesh) -> tuple[str, ...]:
    """What is not plain about how modules run."""
    is_plain = mesh.memory_format == Execution().memory_format
    formats = [] if is_plain else [mesh.memory_format]
    return (*(["compiled"] * mesh.compile), *formats, *(["generated"] * mesh.generated))
