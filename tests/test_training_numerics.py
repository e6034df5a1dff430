"""Learning-rate schedules, evaluation and loss scaling: exactly one process's numbers in float64."""

import dataclasses
import json
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from distributed import tiny_gpt, tiny_norm
from distributed.launch import run_ranks
from distributed.tiny_parallel import parallel_model
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler

from autoplan.runtime import Config, ParallelModel, PlainTraining, build_rank_mesh, compare, global_batch, local_batch
from autoplan.runtime.float32_products import set_float32_products
from autoplan.runtime.parity import Differences, largest_difference
from autoplan.runtime.stages.grad_compression import parameter_groups
from autoplan.runtime.stages.zero import local_part
from autoplan.runtime.update.learning_rate import (
    LearningRate,
    LearningRateError,
    build_scheduler_of,
    load_scheduler,
    step_scheduler,
)
from autoplan.runtime.update.loss_scale import GROWTH_STEPS, LossScale
from autoplan.runtime.update.optimizer import OptimizerError, build_optimizer_of, hasten

BLOCKS = tuple(f"blocks.{layer}" for layer in range(tiny_gpt.N_LAYERS))
PLAIN = Config(precision="fp64", micro_batch_size=2, n_micro_batches=2, blocks=BLOCKS)
TOLERANCE = 1e-9
RATES = LearningRate("cosine", n_steps=4, warmup_steps=2, smallest=1e-3)


def plan(**fields):
    return dataclasses.replace(PLAIN, **fields)


EVALUATED = {
    "zero 3 with recompute": plan(dp=2, zero_stage=3, zero_shard_degree=2, recompute=BLOCKS),
    "chunked loss": plan(dp=2, zero_stage=2, zero_shard_degree=2, chunked_head="head", loss_slice_rows=5),
    "ignored target": plan(dp=2, ignored_target=3),
    "tp 2": plan(tp=2),
    "pp 2 interleaved": plan(pp=2, n_chunks=2, schedule="interleaved"),
    "pp 2 zero-bubble V": plan(pp=2, n_chunks=2, schedule="zero_bubble_v"),
}


def _loss_without_ignored(outputs, targets):
    flat = outputs.reshape(-1, tiny_gpt.VOCABULARY)
    return torch.nn.functional.cross_entropy(flat, targets.reshape(-1), ignore_index=3)


def _model_file(config, **functions):
    loss_fn = tiny_gpt.loss_fn if config.ignored_target is None else _loss_without_ignored
    own = {"build_model": tiny_gpt.build_model, "make_batch": tiny_gpt.make_batch, "loss_fn": loss_fn}
    return SimpleNamespace(**own | functions)


def _build(config, model_file, **options):
    generated = parallel_model(config.tp, config.n_stages) if config.tp * config.pp > 1 else None
    options = {"seed": 7, "learning_rate": 1e-2, **options}
    model = ParallelModel(config, model_file, generated, mesh=build_rank_mesh(config, "cpu"), **options)
    plain = PlainTraining(config, model_file, build_device=torch.device("cpu"), device=torch.device("cpu"), **options)
    return model, plain


def _batch(model, step):
    size = model.config.global_batch_size
    batch = global_batch(tiny_gpt.make_batch, batch_size=size, seed=7, step=step)
    return batch, local_batch(batch, config=model.config, dp_rank=model.mesh.dp_rank)


def _worst_difference(config):
    """Of training with a schedule and an evaluation after each step, from one process; infinite if the rates differ."""
    model, plain = _build(config, _model_file(config), learning_rates=RATES)
    worst = 0.0
    for step in range(3):
        batch, own = _batch(model, step)
        expected_rate = RATES.at(step, largest=1e-2)
        if not math.isclose(model.learning_rate, expected_rate, rel_tol=1e-12):
            return math.inf
        loss = model.step(own).item()
        found = compare(model, plain, loss=loss, plain_loss=plain.step(batch))
        whole, part = _batch(model, 100 + step)
        evaluated, _ = model.evaluate(part)
        worst = max(worst, *dataclasses.astuple(found), abs(evaluated.item() - plain.evaluate(whole)))
    return worst


def _all_differences():
    return {name: _worst_difference(config) for name, config in EVALUATED.items()}


def test_a_schedule_and_evaluation_between_steps_keep_every_plan_equal_to_one_process():
    for found in run_ranks(_all_differences, 2):
        assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}


BESIDE_A_GRAPH = {
    "zero 1": plan(dp=2, zero_stage=1, zero_shard_degree=2, precision="bf16"),
    "zero 3": plan(dp=2, zero_stage=3, zero_shard_degree=2),
    "chunked loss of a head group": plan(
        dp=2, zero_stage=1, zero_shard_degree=2, head_group="head", chunked_head="head", loss_slice_rows=5
    ),
    "pp 2 in bf16": plan(pp=2, precision="bf16", schedule="1f1b"),
}


def _trained_and_evaluated(config, *, graph):
    """Losses of evaluations and steps in turn; of both, which blocks were gathered whenever there was a loss."""
    model, _ = _build(config, _model_file(config, **({"build_model": tiny_gpt.untied} if config.head_group else {})))
    loss_fn, found, gathered = model._loss_fn, [], {False: set(), True: set()}

    def noting_loss(outputs, targets):
        modules = [pair for stage in model.stages for pair in stage.named_modules() if "blocks" in pair[0]]
        gathered[model.stages.training].update(name for name, module in modules if _is_gathered(module))
        return loss_fn(outputs, targets)

    model._loss_fn = noting_loss
    for step in range(2):
        model._graph = graph
        found.append(model.evaluate(_batch(model, 100 + step)[1])[0].item())
        model._graph = None
        found.append(model.step(_batch(model, step)[1]).item())
    return found, gathered[False], gathered[True]


def _is_gathered(module):
    return isinstance(module, FSDPModule) and any(group.is_unsharded for group in parameter_groups(module))


def _beside_a_graph():
    graph = SimpleNamespace(forget_seen=lambda: None)
    return {
        name: [_trained_and_evaluated(config, graph=graph) for graph in (graph, None)]
        for name, config in BESIDE_A_GRAPH.items()
    }


def test_an_evaluation_beside_a_graph_gathers_a_block_at_a_time_and_changes_no_number():
    for rank, found in enumerate(run_ranks(_beside_a_graph, 2)):
        for name, ((losses, evaluated, trained), alone) in found.items():
            assert evaluated == set() and (losses, trained) == (alone[0], alone[2])
            has_loss, is_freed = rank == 1 or not name.startswith("pp"), name == "zero 3"
            assert bool(alone[1]) == bool(trained) == (has_loss and not is_freed)


def test_rates_follow_their_formula():
    linear = LearningRate("linear", n_steps=10, warmup_steps=2, smallest=1.0)
    # 8/2, 8; then 1 + 7 x (1 - p), p = 0, 1/8, ...
    assert [linear.at(step, largest=8.0) for step in (0, 1, 2, 6, 10, 99)] == [4.0, 8.0, 8.0, 4.5, 1.0, 1.0]
    short = LearningRate("linear", n_steps=3, warmup_steps=8)  # the first steps of a longer run
    assert [short.at(step, largest=8.0) for step in range(3)] == [1.0, 2.0, 3.0]
    cosine = LearningRate("cosine", n_steps=4)
    assert [cosine.at(step, largest=2.0) for step in (0, 2, 4)] == pytest.approx([2.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"curve": "exotic"}, "--lr-schedule: found 'exotic', expected one of constant, cosine, linear"),
        ({"warmup_steps": -1}, "--warmup-steps: found -1, expected 0 or more"),
        ({"smallest": -1.0}, "--min-lr: found -1, expected 0 or more"),
    ],
)
def test_impossible_rates_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        LearningRate(**fields)


def test_the_model_file_may_build_its_own_scheduler():
    model_file = SimpleNamespace(
        build_scheduler=lambda optimizer, n_steps: torch.optim.lr_scheduler.StepLR(optimizer, n_steps)
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    own = build_scheduler_of(model_file, optimizer, LearningRate("cosine", n_steps=3, warmup_steps=1))
    assert isinstance(own, torch.optim.lr_scheduler.StepLR) and own.step_size == 3
    assert build_scheduler_of(SimpleNamespace(), optimizer, LearningRate()) is None
    optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)], "lr": 0.0})
    build_scheduler_of(SimpleNamespace(), optimizer, LearningRate("linear", n_steps=3))
    assert optimizer.param_groups[1]["lr"] == 0.0  # a group that learns nothing
    with pytest.raises(LearningRateError, match="--min-lr: found 2, expected at most the optimizer's own 1"):
        build_scheduler_of(SimpleNamespace(), optimizer, LearningRate("linear", n_steps=3, smallest=2.0))


@pytest.mark.parametrize(
    ("build_optimizer", "message"),
    [
        (lambda params: None, "build_optimizer: found None(.|\n)*fix: end it by `return optimizer`"),
        (
            lambda params: (torch.optim.SGD(params), None),
            "found a tuple(.|\n)*fix: return the optimizer alone; a sched",
        ),
        (torch.optim.LBFGS, "build_optimizer: found LBFGS, whose step needs a closure"),
    ],
)
def test_what_is_no_optimizer_ends_the_program_with_what_to_return(build_optimizer, message):
    with pytest.raises(OptimizerError, match=message):
        build_optimizer_of(SimpleNamespace(build_optimizer=build_optimizer), [torch.nn.Parameter(torch.ones(2))], 1.0)


@pytest.mark.parametrize("build_optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
def test_optimizers_of_torch_pass(build_optimizer):
    parameters = [torch.nn.Parameter(torch.ones(2))]
    found = build_optimizer_of(SimpleNamespace(build_optimizer=build_optimizer), parameters, 1.0)
    assert isinstance(found, build_optimizer)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_of_the_user_is_handed_the_elements_of_its_rank_and_keeps_sharded_state(kind):
    sharded, whole = (torch.nn.Linear(3, 5) for _ in range(2))
    whole.load_state_dict(sharded.state_dict())
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    model_file = SimpleNamespace(build_optimizer=lambda p: kind([{"params": p[:1]}, {"params": p[1:], "lr": 0.1}]))
    optimizer = build_optimizer_of(model_file, list(sharded.parameters()), 1.0)
    alone = kind([{"params": [whole.weight]}, {"params": [whole.bias], "lr": 0.1}])
    for each in (sharded, whole):
        each(torch.ones(2, 3)).square().sum().backward()
    handed = [[] for _ in range(6)]
    for group in optimizer.param_groups:
        optimizer._init_group(group, *handed)
    assert all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensors in handed for tensor in tensors)
    for _ in range(2):
        optimizer.step()
        alone.step()
    for (name, parameter), expected in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(parameter.full_tensor(), expected), name
        assert isinstance(optimizer.state[parameter]["exp_avg"], DTensor)


@pytest.mark.parametrize(
    ("asked", "is_cuda", "expected"),
    [
        ({}, True, True),
        ({}, False, None),
        ({"foreach": True}, True, None),
        ({"fused": False}, True, False),
        ({"differentiable": True}, True, None),
    ],
)
def test_adam_of_the_user_is_one_kernel_on_a_gpu_unless_that_says_how(asked, is_cuda, expected):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], **asked)
    optimizer.param_groups[0]["params"] = [SimpleNamespace(is_cuda=is_cuda)]
    assert hasten(optimizer).param_groups[0]["fused"] is expected


def test_an_optimizer_that_wants_names_is_told_that_there_are_none():
    def build_optimizer(params):
        return torch.optim.SGD([parameter for name, parameter in params if "bias" not in name])

    model_file = SimpleNamespace(build_optimizer=build_optimizer)
    with pytest.raises(ValueError, match="not enough values to unpack|too many values") as raised:
        build_optimizer_of(model_file, [torch.nn.Parameter(torch.ones(3, 4))], 1.0)
    assert "without their names" in raised.value.__notes__[0]


def test_a_scheduler_that_is_not_returned_ends_the_program():
    optimizer = torch.optim.SGD([torch.ones(1)], lr=1.0)
    model_file = SimpleNamespace(build_scheduler=lambda optimizer, n_steps: None)
    with pytest.raises(LearningRateError, match="build_scheduler: found None(.|\n)*fix: end it by `return scheduler`"):
        build_scheduler_of(model_file, optimizer, LearningRate())


@pytest.mark.parametrize(
    "build",
    [
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 3]),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.MultiStepLR(optimizer, [1, 3])],
            [2],
        ),
    ],
    ids=["milestones", "plateau", "in turn"],
)
def test_a_scheduler_of_torch_goes_on_from_a_state_that_was_json(build):
    def build_optimizer():
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    losses = [torch.tensor(loss) for loss in (2.0, 1.0, 3.0, 3.0, 3.0, 3.0)]  # worse for two steps, then for two more
    optimizer, rates = build_optimizer(), []
    scheduler = build(optimizer)
    for step, loss in enumerate(losses):
        if step == 1:
            saved = json.loads(json.dumps(scheduler.state_dict()))
            resumed = build_optimizer()
            going_on = build(resumed)
            load_scheduler(going_on, saved)
            resumed.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        optimizer.step()
        step_scheduler(scheduler, loss)
        rates.append(optimizer.param_groups[0]["lr"])
        if step >= 1:
            resumed.step()
            step_scheduler(going_on, loss)
            assert resumed.param_groups[0]["lr"] == pytest.approx(rates[-1], rel=1e-12)
    assert rates[-1] < 0.011


def test_loss_scale_halves_doubles_and_stops_where_it_cannot_help():
    scale = LossScale(value=4.0)
    for _ in range(GROWTH_STEPS):
        scale.grow()
    assert scale.value == 8.0 and scale.n_good_steps == 0
    scale.grow()
    again = LossScale()
    again.load_state_dict(scale.state_dict())
    assert again == scale
    for _ in range(3):
        scale.back_off()
    assert scale == LossScale(value=1.0)
    with pytest.raises(FloatingPointError, match="not finite even with a loss scale of 1"):
        scale.back_off()


# ------------------------------------------------------------------------------------- float16

SCALED = {
    "zero 2": plan(dp=2, zero_stage=2, zero_shard_degree=2),
    "tp 2": plan(tp=2),
    "pp 2": plan(pp=2),
}


def _scaled_difference(config):
    """Of scaled training from unscaled: in float64, with a loss scale set by hand, and with clipping."""
    model, plain = _build(config, _model_file(config), max_grad_norm=0.05)
    model.loss_scale = LossScale()
    worst = 0.0
    for step in range(3):
        batch, own = _batch(model, step)
        loss = model.step(own).item()
        worst = max(worst, *dataclasses.astuple(compare(model, plain, loss=loss, plain_loss=plain.step(batch))))
    return worst


def _explosive_loss(outputs, targets):
    """Of a micro-batch whose targets are all 5 it is a million times the loss, which overflows float16 in backward."""
    return tiny_gpt.loss_fn(outputs, targets) * (1e6 if bool((targets == 5).all()) else 1.0)


def _parameters(model):
    return torch.cat([local_part(entry.detach()).flatten() for entry in model.parameters()])


def _skips_together(config):
    """(kept all parameters, scale, rate went on) of a step that overflows on one rank; and whether training goes on."""
    model, _ = _build(config, _model_file(config, loss_fn=_explosive_loss), learning_rates=RATES)
    before, rate = _parameters(model).clone(), model.learning_rate
    batch, _ = _batch(model, 0)
    batch[1][-2:] = 5  # the last micro-batch of the last data-parallel rank
    model.step(local_batch(batch, config=config, dp_rank=model.mesh.dp_rank))
    skipped = (
        torch.equal(_parameters(model), before),
        model.was_updated,
        model.loss_scale.value,
        model.learning_rate == rate,
    )
    model.step(_batch(model, 1)[1])
    went_on = (model.was_updated, not torch.equal(_parameters(model), before), model.learning_rate > rate)
    return skipped, went_on


def _all_scaled():
    differences = {name: _scaled_difference(config) for name, config in SCALED.items()}
    skips = {name: _skips_together(dataclasses.replace(c, precision="fp16")) for name, c in SCALED.items()}
    return differences, skips


def test_scaling_is_exact_and_an_overflow_on_one_rank_skips_the_update_on_all():
    for differences, skips in run_ranks(_all_scaled, 2):
        assert {name: error for name, error in differences.items() if not error <= TOLERANCE} == {}
        for name, (skipped, went_on) in skips.items():
            assert skipped == (True, False, 2.0**15, True), name
            assert went_on == (True, True, True), name


# ------------------------------------------------------------------------------------- optimizers of whole tensors


def _muon(parameters):
    return torch.optim.Muon([parameter for parameter in parameters if parameter.dim() == 2])


class _Rebinding(torch.optim.SGD):
    """Gives parameters other memory, in place of changing what is theirs."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.1 * parameter.grad


def _of_whole_tensors():
    """By optimizer: the largest difference of replicated parameters from plain ones that got the same gradients.

    The first two divide by the size of gradients, so that of gradients that are zero but for rounding, as of the bias
    of keys, one process by itself would make something else.
    """
    found = {}
    for build_optimizer in (torch.optim.Adafactor, _muon, _Rebinding):
        model, _ = _build(plan(dp=2), _model_file(plan(dp=2), build_optimizer=build_optimizer))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        plain = {name: torch.nn.Parameter(whole.clone()) for name, whole in model.full_parameters()}
        optimizer = build_optimizer(list(plain.values()))
        for step in range(3):
            model.step(_batch(model, step)[1])
            for name, gradient in model.full_gradients():
                plain[name].grad = gradient
            optimizer.step()
        found[build_optimizer] = max(
            (whole - plain[name].detach()).abs().max().item() for name, whole in model.full_parameters()
        )
    return found


def test_optimizers_of_whole_tensors_update_replicas_as_they_do_plain_tensors():
    for found in run_ranks(_of_whole_tensors, 2):
        assert len(found) == 3 and max(found.values()) <= 1e-12, found


# ------------------------------------------------------------------------------------- what is alive, and in what dtype


def _dtypes_and_kept_outputs():
    """Of bf16 training under ZeRO 2: dtypes of what the optimizer sees, and the outputs alive as backward begins."""
    config = plan(dp=2, zero_stage=2, zero_shard_degree=2, precision="bf16")
    alive, made = [], []

    def loss_fn(outputs, targets):
        made.append(weakref.ref(model_outputs.pop()))
        loss = tiny_gpt.loss_fn(outputs, targets)
        loss.register_hook(lambda _: alive.append(made[-1]() is not None))
        return loss

    model, _ = _build(config, _model_file(config, loss_fn=loss_fn))
    model_outputs = []
    model.stages[0].register_forward_hook(lambda module, inputs, outputs: model_outputs.append(outputs))
    kept = []
    prepare = model._prepare_backward

    def prepare_and_look(stage, is_last_micro_batch):
        kept.append(_n_reduction_inputs(stage))
        prepare(stage, is_last_micro_batch)

    model._prepare_backward = prepare_and_look
    model.step(_batch(model, 0)[1])
    states = [value for state in model.optimizer.state.values() for value in state.values() if value.dim()]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *states]
    return {tensor.dtype for tensor in tensors}, alive, kept


def _n_reduction_inputs(root):
    context = root._get_fsdp_state()._comm_ctx
    states = getattr(context, "reduce_scatter_states", None)
    return len(states) if states is not None else int(context.reduce_scatter_state is not None)


def test_bf16_keeps_and_reduces_in_float32_and_holds_no_output_or_reduced_gradient_into_a_backward_pass():
    for dtypes, alive, kept in run_ranks(_dtypes_and_kept_outputs, 2):
        assert dtypes == {torch.float32}
        assert alive == [False, False]  # two micro-batches
        assert kept == [0, 0]


@pytest.mark.parametrize(
    ("parameter", "unexplained", "buffer", "is_wrong"),
    [
        (4.6e-9, -1e-9, 5e-9, False),  # the gradients' rounding moved a bias, and its running mean with it
        (4.6e-9, 2e-9, 0.0, True),
        (4.6e-9, -1e-9, 6e-9, True),  # 4.6e-9 of it is explained, and 1e-9 is rounding
        (0.0, 0.0, 2e-9, True),
        (float("inf"), float("inf"), 0.0, True),
    ],
)
def test_only_what_rounding_of_gradients_cannot_explain_is_a_difference(parameter, unexplained, buffer, is_wrong):
    config = SimpleNamespace(precision="fp64", computes_in_float32=False)
    found = Differences(loss=0.0, gradient=1e-13, parameter=parameter, unexplained=unexplained, buffer=buffer)
    assert found.exceeds(found.tolerances(config, step=0, learning_rate=1e-3)) == is_wrong


def _blamed(precision):
    """In one process: what is named after a step when something of the program is changed, by what."""
    config = Config(precision=precision, micro_batch_size=2)
    mesh = build_rank_mesh(config, "cpu")
    options = {"seed": 7, "learning_rate": 1e-2}

    def named(*, loss=0.0, of_gradient=0.0, of_parameter=0.0, of_buffer=0.0):
        model = ParallelModel(config, tiny_norm, mesh=mesh, **options)
        plain = PlainTraining(config, tiny_norm, build_device=mesh.device, device=mesh.device, **options)
        batch = global_batch(tiny_norm.make_batch, batch_size=2, seed=7, step=0)
        found, expected = model.step(batch).item() * (1.0 + loss), plain.step(batch)  # above 1
        (whole,) = model.stages
        with torch.no_grad():
            whole.head.bias.grad[0] += of_gradient
            whole.head.weight[0, 0] += of_parameter
            whole.blocks[1].norm.running_mean[0] += of_buffer
        differences = compare(model, plain, loss=found, plain_loss=expected)
        tolerances = differences.tolerances(config, step=0, learning_rate=1e-2)
        assert differences.exceeds(tolerances)
        return largest_difference(model, plain, loss=differences.loss, tolerances=tolerances)

    return {
        "buffer": named(of_buffer=0.06),
        "both": named(of_gradient=0.08, of_buffer=0.06),
        "parameter": named(of_parameter=0.5, of_buffer=0.06),
        "within": named(of_parameter=1e-2, of_buffer=1e-3),
        "loss": named(loss=0.03),
    }


def test_what_is_furthest_above_its_tolerance_is_named():
    statistics = "the buffer blocks.1.norm.running_mean"
    (exact,) = run_ranks(_blamed, 1, "fp64")
    assert exact == {
        "buffer": f"{statistics} (6.0e-02)",
        "both": "the gradient of head.bias (8.0e-02)",
        "parameter": "head.weight (5.0e-01)",
        "within": "head.weight (1.0e-02)",
        "loss": "the loss alone (3.0e-02)",
    }
    (rounded,) = run_ranks(_blamed, 1, "fp32")  # parameters may differ by two updates, 2e-2
    assert rounded["within"] == f"{statistics} (1.0e-03)"
    assert rounded["parameter"] == f"{statistics} (6.0e-02)"  # 600 tolerances; of the weight, 25


def test_products_of_float32_are_rounded_under_tf32_only():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for precision, expected in (
            ("tf32", ("high", True)),
            ("fp32", ("highest", False)),
            ("bf16", ("highest", False)),
        ):
            set_float32_products(precision)
            assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == expected
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
    config = Config(precision="tf32")
    assert config.parameter_dtype == config.compute_dtype == torch.float32
