"""What a plan changes in the meaning of a model, in plain sentences: OpGraph + Plan -> notes of the report.

Each entry of `STATEMENTS` looks for one thing and says one sentence about it, or nothing. A plan that trains exactly as
one process does, up to the order of additions, has no notes.
"""

from __future__ import annotations

from collections.abc import Callable

from autoplan.analysis.across_samples import mixing_op, nonlinear_op, operator_name, sum_op
from autoplan.analysis.random_numbers import drop_probability, is_random
from autoplan.equations import argument
from autoplan.errors import InputError, UsageError
from autoplan.graph import DIFFERS_SHARDED, LOSS_PATH, WHOLE_OPTIMIZER, Op, OpGraph, PerSample, Ref
from autoplan.options import POWERSGD_START_STEP
from autoplan.parallel_plan import Plan

_MEAN = 1  # the number of the reduction "mean" in ATen
# Where the ignored target stands among the arguments of losses that leave some targets out of their mean.
_IGNORE_INDEX = {
    "aten.cross_entropy_loss.default": 4,
    "aten.nll_loss.default": 4,
    "aten.nll_loss_nd.default": 4,
    "aten.nll_loss2d.default": 4,
}
_DEFAULT_IGNORE_INDEX = -100
# What may stand between the targets of the batch and the loss without changing how many of them count.
_KEEPS_TARGETS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints", "contiguous.default",
        "alias.default", "transpose.int", "permute.default", "clone.default", "squeeze.dim", "unsqueeze.default",
    )
)  # fmt: skip
_BATCH_NORM_COUNT = "num_batches_tracked"  # of the passes through torch's BatchNorm, of which `_batch_norm` speaks
_TAKES_TARGETS = _KEEPS_TARGETS | {"aten.slice.Tensor", "aten.select.int"}


_OWN_GRADIENTS = {
    "autograd.Function": "a torch.autograd.Function of its own",
    "gradient hook": "a hook that may change gradients",
}
OWN_GRADIENTS_FIX = (
    "make it a torch.library.custom_op with register_autograd, or write the gradient as tensor operations"
    " (x + (y - x).detach() has the value of y and the gradient of x)"
)

COUNTED_MEAN = "F.cross_entropy(..., ignore_index=...) and --fix loss_average=global_batch keep it on any mesh"


def notes(graph: OpGraph, plan: Plan) -> tuple[str, ...]:
    """One sentence for each thing that means something else under the plan than in one process."""
    said = (statement(graph, plan) for statement in STATEMENTS)
    return tuple(sentence for sentence in said if sentence)


def own_gradients(graph: OpGraph) -> str:
    """What of the model says what gradients are, in words; "" where nothing does."""
    return " and ".join(text for word, text in _OWN_GRADIENTS.items() if word in graph.dissolved)


def ignored_target(graph: OpGraph) -> int | None:
    """The target that the loss leaves out of its mean; None when no loss is a mean over integer targets."""
    loss = _mean_over_targets(graph)
    if loss is None:
        return None
    position = _IGNORE_INDEX[loss.target]
    return int(argument(loss, position, "ignore_index", default=_DEFAULT_IGNORE_INDEX))


def check_loss_average(graph: OpGraph, loss_average: str | None, *, error: type[InputError] = InputError) -> None:
    """Return when the loss can be averaged so.

    Raises: `error` for "global_batch" unless the loss is one mean over all targets of the batch, so that the batch
        tells how many count.
    """
    if loss_average == "global_batch" and not _targets_are_those_of_the_batch(graph):
        raise error.of(
            "--fix loss_average=global_batch",
            found="a loss that is not one mean over the integer targets of the batch, as they are",
            expected="loss_fn to return F.cross_entropy(outputs, targets), of any shape, with reduction mean",
            fix="leave it out, or divide by the number of targets of a whole batch in loss_fn yourself",
        )


def check_batch_norm(graph: OpGraph, batch_norm: str | None) -> None:
    """Return when the model has what `batch_norm` is about; raises UsageError otherwise."""
    if batch_norm is not None and not _has_batch_norm(graph):
        raise UsageError.of(
            f"--fix batch_norm={batch_norm}",
            found="no BatchNorm",
            expected="a model with BatchNorm",
            fix="leave batch_norm out",
        )


def _batch_norm(graph: OpGraph, plan: Plan) -> str:
    mesh = plan.mesh
    if not _has_batch_norm(graph) or mesh.dp * mesh.n_micro_batches == 1:
        return ""
    whole = f"not of the global batch ({mesh.global_batch_size})"
    if plan.batch_norm == "synchronized" and mesh.n_micro_batches == 1:
        return "" if mesh.dp == 1 else "The estimate leaves the communication of synchronized BatchNorm out."
    if mesh.dp == 1:
        return f"BatchNorm normalizes by the statistics of one micro-batch ({mesh.micro_batch_size} samples), {whole}."
    if plan.batch_norm == "synchronized":
        return (
            f"BatchNorm normalizes by the statistics of one micro-batch on all {mesh.dp} data-parallel ranks"
            f" ({mesh.dp * mesh.micro_batch_size} samples), {whole}; the estimate leaves its communication out."
        )
    return (
        f"BatchNorm normalizes by the statistics of one micro-batch on one rank ({mesh.micro_batch_size} samples),"
        f" {whole}, and each data-parallel rank keeps its own running statistics, of which rank 0's are the ones to"
        " save; --fix batch_norm=synchronized takes the samples of all data-parallel ranks."
    )


def _loss_average(graph: OpGraph, plan: Plan) -> str:
    ignored = ignored_target(graph)
    if (
        ignored is None
        or (ignored < 0 and _are_indices(graph))
        or (ignored == _DEFAULT_IGNORE_INDEX and _are_classes_of_samples(graph))
        or plan.mesh.dp * plan.mesh.n_micro_batches == 1
        or plan.loss_average == "global_batch"
    ):
        return ""
    is_accepted = _targets_are_those_of_the_batch(graph)
    return (
        f"Only where some targets are {ignored}, which the loss ignores: the mean is taken over the others of each"
        " micro-batch, and then over micro-batches and ranks, so a target weighs more where fewer count"
        + ("; --fix loss_average=global_batch takes it over the global batch." if is_accepted else ".")
    )


def _mixed_samples(graph: OpGraph, plan: Plan) -> str:
    mesh = plan.mesh
    is_parted = mesh.dp * mesh.n_micro_batches > 1
    op = (mixing_op(graph) or nonlinear_op(graph)) if is_parted else None
    if op is None:
        return ""
    is_mean = op.module_path == LOSS_PATH and operator_name(op) == "div"
    as_mean = f" If it is a mean over targets that count: {COUNTED_MEAN}." if is_mean else ""
    return (
        f"Samples of a batch are put together, in {_place(op)}: each micro-batch does so with"
        f" its own {mesh.micro_batch_size} of the {mesh.global_batch_size} samples of a step, so this trains something"
        f" else than one process that takes all at once; --fix dp=1,micro_batch={mesh.global_batch_size} keeps it."
        + as_mean
    )


def _summed_loss(graph: OpGraph, plan: Plan) -> str:
    n_parts = plan.mesh.dp * plan.mesh.n_micro_batches
    if n_parts == 1 or sum_op(graph) is None:
        return ""
    return (
        "The loss is a sum over samples, while micro-batches and data-parallel ranks are averaged: loss and gradients"
        f" are 1/{n_parts} of those of one process that takes the whole batch; a mean means the same in both."
    )


def _grad_compression(graph: OpGraph, plan: Plan) -> str:
    if plan.grad_compression == "bf16":
        return (
            f"Gradients are rounded to bfloat16 (8 bits of mantissa) to be summed over {plan.mesh.dp} data-parallel"
            " ranks in it: losses differ from those of one process as those of two bf16 runs do."
        )
    if plan.grad_compression == "powersgd":
        return (
            f"Gradients of matrices are summed over {plan.mesh.dp} data-parallel ranks as products of rank"
            f" {plan.powersgd_rank} from step {POWERSGD_START_STEP} on, and what a step loses is added to the next, but"
            " not kept in checkpoints: another training than that of one process, whose losses only a trial run can"
            " tell; its time is counted with the optimizer, since torch's hook waits for the device."
        )
    return ""


def _dropout(graph: OpGraph, plan: Plan) -> str:
    if plan.mesh.n_devices == 1 or not any(drop_probability(op) for op in graph.ops):
        return ""
    return "Dropout draws its masks on each rank: they differ from those of one process, so losses agree on average."


def _random_numbers(graph: OpGraph, plan: Plan) -> str:
    drawing = next((op for op in graph.ops if is_random(op)), None)
    if plan.mesh.n_devices == 1 or drawing is None:
        return ""
    return (
        f"Random numbers are drawn, in {_place(drawing)}: each rank draws others than one process does, so losses agree"
        " on average, and verify finds a difference."
    )


def _written_buffers(graph: OpGraph, plan: Plan) -> str:
    mesh = plan.mesh
    buffers = {p.name for p in graph.parameters if p.is_buffer and p.name.split(".")[-1] != _BATCH_NORM_COUNT}
    copies = (op.args[0].name for op in graph.ops if op.target == "aten.copy_.default")
    written = list(dict.fromkeys(name for name in copies if name in buffers))
    if not written or mesh.dp * mesh.n_micro_batches == 1:
        return ""
    others = f" and {len(written) - 1} more" if len(written) > 1 else ""
    own = (
        f": each data-parallel rank changes its own, {mesh.n_micro_batches} times a step; rank 0's are the ones"
        " to save, and verify finds a difference."
        if mesh.dp > 1
        else f", {mesh.n_micro_batches} times a step, not once as in one process that takes the whole batch."
    )
    return f"The model's forward changes its buffers, {written[0]}{others}{own}"


def _own_gradients(graph: OpGraph, plan: Plan) -> str:
    if not graph.has_own_gradients:
        return ""
    return (
        f"The model has {own_gradients(graph)}, which the traced graph does not hold: its own classes run, so neither"
        f" tensor nor pipeline parallelism is planned; to have them, {OWN_GRADIENTS_FIX}."
    )


def _untried_optimizer(graph: OpGraph, plan: Plan) -> str:
    if not graph.optimizer_failure:
        return ""
    return (
        "Whether the optimizer of build_optimizer computes with whole tensors is not known, as it fails on a matrix and"
        f" a bias ({graph.optimizer_failure}): if it fails on the model's parameters too, so does the program."
    )


def _whole_optimizer(graph: OpGraph, plan: Plan) -> str:
    mesh = plan.mesh
    looks = "The optimizer of build_optimizer computes with whole tensors (norms, products)"
    if WHOLE_OPTIMIZER in graph.dissolved and mesh.tp > 1:
        return (
            f"{looks}, of which it has a part on each tensor-parallel rank, so this trains something else than one"
            " process does; --fix tp=1 keeps them whole."
        )
    if mesh.zero_stage and DIFFERS_SHARDED in graph.dissolved:
        return (
            "The optimizer of build_optimizer updates torch's distributed tensors, which ZeRO gives it, otherwise than"
            " whole ones, so this trains something else than one process does; --fix zero=0 keeps them whole."
        )
    if mesh.zero_stage and WHOLE_OPTIMIZER in graph.dissolved:
        return (
            f"{looks}, of which ZeRO keeps a part on each rank: what it rounds on the way to a result of all parts, as"
            " Muon does to bf16, comes out otherwise than in one process, as verify tells; --fix zero=0 keeps them"
            " whole."
        )
    return ""


def _checkpoint(graph: OpGraph, plan: Plan) -> str:
    if "checkpoint" not in graph.dissolved:
        return ""
    if plan.mesh.needs_generated_model:
        return (
            "The model's forward calls torch.utils.checkpoint, which the generated code does not: the plan alone"
            " decides what is recomputed."
        )
    return (
        "The model's forward calls torch.utils.checkpoint and keeps doing so, beside what the plan recomputes; the"
        " estimate does not know of it."
    )


def _autocast(graph: OpGraph, plan: Plan) -> str:
    if "autocast" not in graph.dissolved:
        return ""
    if plan.mesh.needs_generated_model:
        return (
            "The model's forward enters torch.autocast, which the generated code does not: it computes in the plan's"
            f" precision, {plan.precision}."
        )
    return (
        "The model's forward enters torch.autocast and keeps doing so, on top of the plan's precision,"
        f" {plan.precision}; the estimate does not know of it."
    )


STATEMENTS: tuple[Callable[[OpGraph, Plan], str], ...] = (
    _batch_norm,
    _loss_average,
    _mixed_samples,
    _summed_loss,
    _grad_compression,
    _dropout,
    _random_numbers,
    _written_buffers,
    _own_gradients,
    _untried_optimizer,
    _whole_optimizer,
    _checkpoint,
    _autocast,
)


def _place(op: Op) -> str:
    """`labels of loss_fn`: an op and whose code calls it."""
    where = "loss_fn" if op.module_path == LOSS_PATH else op.module_path or "the model's forward"
    return f"{op.label or op.target} of {where}"


def _has_batch_norm(graph: OpGraph) -> bool:
    """One in training mode: by its op or, in a graph of whole modules, by its running statistics."""
    if graph.is_module_level:
        return any(own.is_buffer and own.name.split(".")[-1] == "running_mean" for own in graph.parameters)
    return any("batch_norm" in op.target and argument(op, 5, "training", True) for op in graph.ops)


def _mean_over_targets(graph: OpGraph) -> Op | None:
    """The first loss that is a mean over integer targets."""
    specs = graph.specs()
    for op in graph.ops:
        if op.target in _IGNORE_INDEX and argument(op, 3, "reduction", default=_MEAN) == _MEAN:
            targets = op.args[1]
            if isinstance(targets, Ref) and specs[targets.name].dtype == "int64":
                return op
    return None


def _targets_are_those_of_the_batch(graph: OpGraph) -> bool:
    """Whether the loss is one mean over integer targets, and these are the whole targets of the batch."""
    loss = _mean_over_targets(graph)
    targets = [item.name for item in graph.inputs if item.path[0] == "targets"]
    if loss is None or loss.name != graph.loss:
        return False
    return targets == [_origin(graph, loss.args[1].name, _KEEPS_TARGETS)]


def _are_classes_of_samples(graph: OpGraph) -> bool:
    """Whether the loss has one target per sample: a sample without a class would not be there."""
    loss = _mean_over_targets(graph)
    assert loss is not None
    return graph.specs()[loss.args[1].name].shape == (PerSample(1),)


def _are_indices(graph: OpGraph) -> bool:
    """Whether the targets of the loss cannot be negative: positions, or tokens that the model also looks up."""
    loss = _mean_over_targets(graph)
    assert loss is not None
    origin = _origin(graph, loss.args[1].name, _TAKES_TARGETS)
    looked_up = (op.args[1].name for op in graph.ops if op.target == "aten.embedding.default")
    makers = (op.target.split(".")[1] for op in graph.ops if op.name == origin)
    return any(maker in ("arange", "argmax") for maker in makers) or origin in {
        _origin(graph, name, _KEEPS_TARGETS) for name in looked_up
    }


def _origin(graph: OpGraph, name: str, through: frozenset[str]) -> str:
    """What a tensor was made from by `through` alone: an input of the graph, or the result of another op."""
    ops = {op.name: op for op in graph.ops}
    while name in ops and ops[name].target in through:
        name = ops[name].args[0].name
    return name
