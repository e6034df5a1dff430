"""What a plan changes in the meaning of a model is said in one sentence each, and only where it is so."""

import functools
import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoplan.analysis.mixed_operands import fails_in_float64
from autoplan.analysis.semantics import STATEMENTS, notes
from autoplan.answers.answer import answer_from_json, answer_to_dict, answer_to_json
from autoplan.checks.fixes import check_fixed
from autoplan.checks.options import check_options
from autoplan.checks.product_dtypes import check_product_dtypes
from autoplan.cost.boundaries import legal_cuts
from autoplan.errors import InputError, TraceError, UsageError
from autoplan.graph import DIFFERS_SHARDED, WHOLE_OPTIMIZER, OpGraph
from autoplan.hardware import load_hardware_profile
from autoplan.html_report import plan_page
from autoplan.options import Options
from autoplan.parallel_plan import Mesh, Plan, StagePlan
from autoplan.report.explain import explain_report
from autoplan.report.plan import plan_report, program_header
from autoplan.search.meshes import Captures
from autoplan.space.choices import codes
from autoplan.space.priced import priced_space
from autoplan.tracing.model_source import ModelSource
from autoplan.tracing.module_level import trace_modules
from autoplan.tracing.trace import trace_model

WIDTH, N_CLASSES = 4, 3
ONE_PROCESS = Mesh(micro_batch_size=2)
DATA_PARALLEL = Mesh(dp=2, micro_batch_size=2, n_micro_batches=3)
PIPELINE = Mesh(pp=2, micro_batch_size=2, n_micro_batches=3)


class Model(nn.Module):
    """A linear layer, what `inner` does to its output, and another linear layer."""

    def __init__(self, inner):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, N_CLASSES)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


class Calling(nn.Module):
    """`function(layer, x)` as a module."""

    def __init__(self, function):
        super().__init__()
        self.function, self.layer = function, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.function(self.layer, x)


def in_checkpoint(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def in_reentrant_checkpoint(layer, x):
    return checkpoint(layer, x, use_reentrant=True)


def in_autocast(layer, x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return layer(x)


def outside_of_autocast(layer, x):
    with torch.autocast("cuda", enabled=False):
        return layer(x)


def attention(dropout_p):
    def function(layer, x):
        q = layer(x).unsqueeze(1).unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=dropout_p).flatten(1)

    return lambda: Calling(function)


def graph_of(inner=nn.Identity, loss_fn=F.mse_loss, *, is_regression=None, trace=trace_model) -> OpGraph:
    def make_batch(batch_size):
        inputs = torch.randn(batch_size, WIDTH)
        has_decimals = loss_fn is F.mse_loss if is_regression is None else is_regression
        targets = torch.randn(batch_size, N_CLASSES) if has_decimals else torch.randint(N_CLASSES, (batch_size,))
        return inputs, targets

    return trace(ModelSource("toy", "toy.py", lambda: Model(inner()), make_batch, loss_fn))


def notes_of(graph, mesh=DATA_PARALLEL, **fields):
    stages = tuple(StagePlan(i, i + 1) for i in range(mesh.n_stages))
    return notes(graph, Plan(mesh, stages, **{"precision": "fp32", **fields}))


def only_note(graph, mesh=DATA_PARALLEL, **fields):
    (note,) = notes_of(graph, mesh, **fields)
    return note


@pytest.mark.parametrize("mesh", [ONE_PROCESS, DATA_PARALLEL, PIPELINE])
def test_a_model_that_trains_as_in_one_process_has_no_notes(mesh):
    assert notes_of(graph_of(lambda: nn.LayerNorm(WIDTH)), mesh) == ()


def test_local_batch_norm_is_stated_with_its_samples_and_the_other_choice():
    graph = graph_of(lambda: nn.BatchNorm1d(WIDTH))
    note = only_note(graph)
    assert "one micro-batch on one rank (2 samples), not of the global batch (12)" in note
    assert "--fix batch_norm=synchronized" in note
    assert "rank 0" in note
    assert "one micro-batch (2 samples), not of the global batch (6)." in only_note(graph, PIPELINE)
    assert notes_of(graph, ONE_PROCESS) == ()


def test_synchronized_batch_norm_is_stated_with_its_samples():
    note = only_note(graph_of(lambda: nn.BatchNorm1d(WIDTH)), batch_norm="synchronized")
    assert "on all 2 data-parallel ranks (4 samples), not of the global batch (12)" in note


@pytest.mark.parametrize("trace", [trace_model, trace_modules])
def test_a_model_that_synchronizes_its_batch_norm_is_planned_so_unless_it_is_fixed(trace):
    def planned(inner, *fix):
        graph = graph_of(lambda: inner(WIDTH), trace=trace)
        space = priced_space(graph, load_hardware_profile("dgx_h100_x8"), Options(fix=fix), global_batch=12)
        plan = space.make_plan(DATA_PARALLEL, (StagePlan(0, len(graph.segments)),))
        return plan.batch_norm, notes_of(graph, batch_norm=plan.batch_norm)[0]

    way, note = planned(nn.SyncBatchNorm)
    assert way == "synchronized"
    assert "on all 2 data-parallel ranks (4 samples)" in note
    way, note = planned(nn.SyncBatchNorm, ("batch_norm", "local"))
    assert way == "local"
    assert "on one rank (2 samples)" in note
    assert planned(nn.BatchNorm1d)[0] == "local"


@pytest.mark.parametrize("trace", [trace_model, trace_modules])
def test_synchronized_batch_norm_is_traced_alike_in_a_process_that_has_joined_a_group(trace):
    alone = graph_of(lambda: nn.SyncBatchNorm(WIDTH), trace=trace)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert graph_of(lambda: nn.SyncBatchNorm(WIDTH), trace=trace) == alone
    finally:
        dist.destroy_process_group()


def test_a_model_whose_synchronized_batch_norm_is_frozen_is_planned_as_any_other():
    class Frozen(nn.SyncBatchNorm):
        def train(self, mode=True):
            return super().train(False)

    assert not graph_of(lambda: Frozen(WIDTH)).synchronizes_batch_norm


def test_batch_norm_without_running_statistics_is_stated_too():
    assert "BatchNorm" in only_note(graph_of(lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False)))


def test_a_mean_over_targets_that_may_be_ignored_is_stated_with_the_ignored_target():
    assert "some targets are -100" in only_note(per_token_graph(cross_entropy_of_tokens))
    assert "some targets are 0" in only_note(graph_of(loss_fn=lambda x, y: F.cross_entropy(x, y, ignore_index=0)))
    assert notes_of(per_token_graph(cross_entropy_of_tokens), ONE_PROCESS) == ()
    assert notes_of(graph_of(loss_fn=F.cross_entropy), DATA_PARALLEL) == ()  # one class per sample
    assert "sum over samples" in only_note(graph_of(loss_fn=lambda x, y: F.cross_entropy(x, y, reduction="sum")))


def test_an_average_over_the_global_batch_is_named_only_where_it_is_accepted():
    advice = "--fix loss_average=global_batch"
    assert advice in only_note(per_token_graph(cross_entropy_of_tokens))
    refused = per_token_graph(lambda x, y: cross_entropy_of_tokens(x, y) + x.square().mean())
    assert "some targets are -100" in only_note(refused) and advice not in only_note(refused)


def cross_entropy_of_tokens(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def per_token_graph(loss_fn):
    make_batch = lambda batch_size: (torch.randn(batch_size, 5, WIDTH), torch.randint(N_CLASSES, (batch_size, 5)))
    return trace_model(ModelSource("toy", "toy.py", lambda: Model(nn.Identity()), make_batch, loss_fn))


class NextToken(nn.Module):
    """Its loss has the tokens that it reads as targets, from the second on."""

    def __init__(self, ignored):
        super().__init__()
        self.table, self.head, self.ignored = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 8), ignored

    def forward(self, tokens):
        logits = self.head(self.table(tokens))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=self.ignored)


def next_token_graph(ignored):
    make_batch = lambda batch_size: (torch.randint(8, (batch_size, 5)), None)
    return trace_model(ModelSource("toy", "toy.py", lambda: NextToken(ignored), make_batch, None))


def test_targets_that_cannot_be_negative_are_not_said_to_be_ignored():
    assert notes_of(next_token_graph(-100), DATA_PARALLEL) == ()
    assert "some targets are 0" in only_note(next_token_graph(0))
    assert notes_of(graph_of(loss_fn=lambda x, y: F.cross_entropy(x, x.argmax(1))), DATA_PARALLEL) == ()
    pairs = lambda x, y: F.cross_entropy(x @ x.T, torch.arange(len(x), device=x.device))
    assert "ignores" not in " ".join(notes_of(graph_of(loss_fn=pairs), DATA_PARALLEL))


def samples_with_samples(outputs, targets):
    return -(outputs @ outputs.T).log_softmax(1).diagonal().mean()


def per_sample(reduce):
    return lambda outputs, targets: reduce((outputs - targets).square().sum(1))


@pytest.mark.parametrize(
    ("inner", "loss_fn", "where"),
    [
        (nn.Identity, samples_with_samples, "of loss_fn"),
        (lambda: Calling(lambda layer, x: x - layer(x).mean(0)), F.mse_loss, "of inner"),
    ],
)
def test_samples_that_are_put_together_are_told_unless_one_micro_batch_has_all(inner, loss_fn, where):
    graph = graph_of(inner, loss_fn)
    assert where in only_note(graph) and "own 2 of the 12 samples" in only_note(graph)
    assert notes_of(graph, ONE_PROCESS) == ()


@pytest.mark.parametrize(
    ("loss_fn", "is_sum"),
    [
        (functools.partial(F.mse_loss, reduction="sum"), True),
        (per_sample(torch.sum), True),
        (per_sample(torch.mean), False),
        (per_sample(lambda losses: losses.sum() / losses.shape[0]), False),
        (per_sample(lambda losses: losses.sum() / torch.ones_like(losses).sum()), False),
    ],
)
def test_a_loss_that_adds_samples_up_is_told_and_a_mean_is_not(loss_fn, is_sum):
    notes = notes_of(graph_of(loss_fn=loss_fn, is_regression=True))
    assert [note for note in notes if "1/6 of those of one process" in note] == list(notes)
    assert bool(notes) == is_sum


@pytest.mark.parametrize(
    ("with_dropout", "without"),
    [(lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.0)), (attention(0.1), attention(0.0))],
    ids=["dropout", "attention"],
)
def test_dropout_is_stated_where_it_drops_something(with_dropout, without):
    graph = graph_of(with_dropout)
    assert "Dropout" in only_note(graph)
    assert notes_of(graph, ONE_PROCESS) == ()
    assert notes_of(graph_of(without)) == ()


@pytest.mark.parametrize("function", [in_checkpoint, in_reentrant_checkpoint])
def test_the_users_own_checkpoint_is_stated_and_what_becomes_of_it(function):
    graph = graph_of(lambda: Calling(function))
    assert "keeps doing so" in only_note(graph)
    assert "the plan alone decides what is recomputed" in only_note(graph, PIPELINE)
    assert notes_of(graph_of(lambda: Calling(lambda layer, x: layer(x)))) == ()


def test_the_users_own_autocast_is_stated_and_what_becomes_of_it():
    graph = graph_of(lambda: Calling(in_autocast))
    assert "keeps doing so, on top of the plan's precision, fp32" in only_note(graph)
    assert "computes in the plan's precision, fp32" in only_note(graph, PIPELINE)
    assert notes_of(graph_of(lambda: Calling(outside_of_autocast))) == ()


class Sign(torch.autograd.Function):
    """The sign, with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def signed(layer, x):
    return Sign.apply(layer(x))


def hooked(layer, x):
    y = layer(x)
    y.register_hook(lambda gradient: gradient / 2)
    return y


class HookedModule(nn.Linear):
    """A layer whose backward hook changes the gradient of its input."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] / 2,))


class Remembering(nn.Module):
    """Keeps a running mean in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        y = x + self.mean
        self.mean.copy_(x.detach().mean(0))
        return y


class Counting(nn.Module):
    """Scales by how often it ran."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n_calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.n_calls += 1
        return x * self.n_calls


@pytest.mark.parametrize("inner", [lambda: Calling(signed), lambda: Calling(hooked), HookedModule])
def test_gradients_that_the_user_defines_are_stated_and_neither_split_nor_cut(inner):
    graph = graph_of(inner)
    assert "neither tensor nor pipeline parallelism is planned" in only_note(graph)
    assert not any(legal_cuts(graph))
    for fix in ("tp", "pp"):
        with pytest.raises(UsageError, match="its own|may change gradients"):
            check_fixed(graph, Options(fix=((fix, "2"),)))
    check_fixed(graph, Options(fix=(("dp", "2"), ("zero", "3"))))
    graph = graph_of(lambda: Calling(lambda layer, x: x + (layer(x) - x).detach()))
    assert notes_of(graph) == ()
    check_fixed(graph, Options(fix=(("tp", "2"),)))


def with_frozen_weights(layer, x):
    return torch.func.functional_call(layer, {name: own.detach() for name, own in layer.named_parameters()}, x)


def with_weights_of_another(layer, x):
    return torch.func.functional_call(nn.Linear(WIDTH, WIDTH, device="meta"), dict(layer.named_parameters()), x)


def test_modules_that_run_with_other_weights_are_generated_code():
    graph, device = graph_of(lambda: Calling(with_frozen_weights)), load_hardware_profile("dgx_h100_x8").device
    assert codes(graph, Options(), None, captures=Captures(), device=device) == (True,)
    with pytest.raises(UsageError, match="generated=off(.|\n)*functional_call"):
        check_fixed(graph, Options(fix=(("generated", "off"),)))
    assert codes(
        graph_of(lambda: Calling(with_weights_of_another)), Options(), None, captures=Captures(), device=device
    ) == (False,)
    with pytest.raises(TraceError, match="functional_call, and has its own autograd.Function(.|\n)*--module-level"):
        graph_of(lambda: Calling(lambda layer, x: with_frozen_weights(layer, signed(layer, x))))


@pytest.mark.parametrize("function", [with_frozen_weights, lambda layer, x: layer.requires_grad_(False)(x)])
def test_whole_modules_that_would_run_otherwise_again_are_not_recomputed(function):
    graph = graph_of(lambda: nn.Sequential(Calling(function)), trace=trace_modules)
    assert not any(segment.is_block for segment in graph.segments)
    with pytest.raises(UsageError, match="recompute=full(.|\n)*functional_call"):
        check_fixed(graph, Options(fix=(("recompute", "full"),)))


@pytest.mark.parametrize("trace", [trace_model, trace_modules])
@pytest.mark.parametrize("own", [nn.Parameter.detach, lambda parameter: parameter.data])
def test_a_parameter_that_forward_writes_into_is_refused(own, trace):
    def averaging(layer, x):
        own(layer.weight).mul_(0.9)
        return layer(x)

    with pytest.raises(TraceError, match="writes into the parameter inner.layer.weight|nor writes .data"):
        graph_of(lambda: Calling(averaging), trace=trace)


def reading_data(layer, x):
    return layer(x) * x.data


def writing_data(layer, x):
    layer.weight.data.mul_(0.9)
    return layer(x)


class WritingBefore(nn.Module):
    """The data of its weight is written where it is made, too, as may be."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.weight.data.fill_(0.5)

    def forward(self, x):
        return reading_data(self.layer, x)


@pytest.mark.parametrize(
    ("inner", "line"),
    [
        (lambda: Calling(reading_data), r"return layer\(x\) \* x\.data"),
        (lambda: Calling(writing_data), r"layer\.weight\.data\.mul_\(0\.9\)"),
        (WritingBefore, r"return layer\(x\) \* x\.data"),
        (lambda: Calling(by_autograd), r"return torch\.autograd\.grad\("),
    ],
)
def test_what_a_trace_does_not_follow_is_refused_with_its_line(inner, line):
    with pytest.raises(TraceError, match=rf"model at \S+test_semantics\.py:\d+: {line}(.|\n)*nor writes \.data"):
        graph_of(inner)


def by_autograd(layer, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(layer(x).sum(), x, create_graph=True)[0]


def by_function_transforms(layer, x):
    return torch.func.vmap(torch.func.grad(lambda sample: layer(sample).sum()))(x)


@pytest.mark.parametrize("function", [by_autograd, by_function_transforms])
def test_gradients_that_forward_takes_are_refused_with_what_can_be_done(function):
    with pytest.raises(TraceError, match="expected: a forward (that takes no gradients|without)(.|\n)*--module-level"):
        graph_of(lambda: Calling(function))


def in_float32(layer, x):
    return layer(x.float())


def convolved_in_float32(layer, x):
    return F.conv1d(x.float().unsqueeze(1), layer.weight.unsqueeze(1), padding=2)[:, 0, :WIDTH]


class Normed(nn.Module):
    """A norm in float32, with weights as they are."""

    def __init__(self, make_norm=nn.LayerNorm, *args, **kwargs):
        super().__init__()
        self.norm = make_norm(*(args or (WIDTH,)), **kwargs)

    def forward(self, x):
        return self.norm(x.float()).to(x.dtype)


def instance_norm():
    return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, affine=True), nn.Flatten())


def with_weights_in_float32(layer, x):
    return F.layer_norm(x, (WIDTH,), layer.bias.float())


def batch_norm_with_weights_in_float32(layer, x):
    return F.batch_norm(x, None, None, layer.bias.float(), training=True)


def in_float32_with_weights(layer, x):
    return F.linear(x.float(), layer.weight.float(), layer.bias.float()).to(x.dtype)


class Rotary(nn.Module):
    """Its buffer is kept in float32, as what it is multiplied with, and only then rounded."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("frequencies", torch.rand(3))

    def forward(self, x):
        places = torch.arange(x.shape[1], dtype=torch.float32, device=x.device)
        return self.layer(x) * torch.einsum("i,j->ij", places, self.frequencies).cos().mean(1).to(x.dtype)


def with_a_float32_mask(layer, x):
    q = layer(x).view(-1, 1, 2, WIDTH // 2)
    mask = x[:, None, :1, None].float()
    return F.scaled_dot_product_attention(q, q, q, mask).flatten(1)


def in_float32_with_autocast(layer, x):
    return in_autocast(layer, x.float()).to(x.dtype)


def weighted(outputs, targets):
    weights = torch.ones(N_CLASSES, device=outputs.device)  # in float32, as outputs are where a loss runs
    return (outputs @ weights - targets.sum(1)).square().mean()


@pytest.mark.parametrize("function", [in_float32, convolved_in_float32])
def test_a_product_of_two_dtypes_is_refused_in_16_bits_alone(function):
    graph = graph_of(lambda: Calling(function))
    with pytest.raises(InputError, match=r"module inner(.|\n)+a product of float32 and bfloat16"):
        check_product_dtypes(graph, "bf16")
    check_product_dtypes(graph, "tf32")


@pytest.mark.parametrize(
    ("inner", "found"),
    [
        (Normed, "float32 with weights in bfloat16"),
        (lambda: Normed(nn.GroupNorm, 2, WIDTH), "float32 with weights in bfloat16"),
        (lambda: Normed(nn.BatchNorm1d, track_running_stats=False), "float32 with weights in bfloat16"),
        (lambda: Normed(lambda _: instance_norm()), "float32 with weights in bfloat16"),
        (lambda: Calling(with_weights_in_float32), "bfloat16 with weights in float32"),
    ],
)
def test_a_norm_that_torch_refuses_for_its_two_dtypes_is_refused_in_16_bits_alone(inner, found):
    graph = graph_of(inner)
    with pytest.raises(InputError, match=rf"toy: module inner\S*: found 'a norm of {found}, aten(.|\n)+weight.float"):
        check_product_dtypes(graph, "bf16")
    check_product_dtypes(graph, "fp32")


@pytest.mark.parametrize(
    "inner",
    [
        lambda: Normed(nn.RMSNorm),
        lambda: Normed(nn.LayerNorm, WIDTH, elementwise_affine=False),
        lambda: Normed(nn.BatchNorm1d),  # with running statistics, beside which programs widen its weights
        lambda: nn.LayerNorm(WIDTH),
        instance_norm,
        lambda: Calling(batch_norm_with_weights_in_float32),
    ],
)
def test_norms_that_torch_takes_pass(inner):
    check_product_dtypes(graph_of(inner), "bf16")


@pytest.mark.parametrize("function", [in_float32_with_weights, in_float32_with_autocast])
def test_products_that_cast_their_operands_and_those_of_a_loss_pass(function):
    graph = graph_of(lambda: Calling(function), weighted, is_regression=True)
    check_product_dtypes(graph, "bf16")


@pytest.mark.parametrize("inner", [Rotary, lambda: Calling(with_a_float32_mask)])
def test_products_with_buffers_kept_in_float32_and_masks_that_attention_adds_pass(inner):
    check_product_dtypes(graph_of(inner), "bf16")


@pytest.mark.parametrize("inner", [lambda: Calling(in_float32), lambda: Calling(convolved_in_float32), Normed])
def test_weights_that_meet_numbers_cast_to_float32_fail_in_float64(inner):
    assert fails_in_float64(graph_of(inner))


@pytest.mark.parametrize("function", [in_float32_with_weights, in_float32_with_autocast, nn.Linear.forward])
def test_numbers_cast_together_with_weights_or_by_autocast_or_in_the_loss_do_not_fail_in_float64(function):
    assert not fails_in_float64(graph_of(lambda: Calling(function), weighted, is_regression=True))


def test_random_numbers_and_written_buffers_are_stated():
    graph = graph_of(lambda: Calling(lambda layer, x: layer(x) + torch.randn_like(x)))
    assert "Random numbers are drawn, in randn_like of inner" in only_note(graph).replace("aten.", "").replace(
        ".default", ""
    )
    graph = graph_of(Remembering)
    assert "inner.mean: each data-parallel rank changes its own, 3 times a step" in only_note(graph)
    assert "3 times a step, not once" in only_note(graph, PIPELINE)
    assert notes_of(graph, ONE_PROCESS) == ()


def test_written_buffers_of_integers_are_stated_but_for_the_counts_of_batch_norm():
    assert "inner.n_calls: each data-parallel rank changes its own, 3 times a step" in only_note(graph_of(Counting))
    assert only_note(graph_of(lambda: nn.BatchNorm1d(WIDTH))).startswith("BatchNorm")


def test_an_optimizer_of_whole_tensors_is_stated_where_a_plan_gives_it_parts():
    graph = graph_of()
    whole = replace(graph, dissolved=(WHOLE_OPTIMIZER,))
    assert "--fix tp=1 keeps them whole" in only_note(whole, Mesh(tp=2, micro_batch_size=2))
    assert "--fix zero=0 keeps them whole" in only_note(whole, replace(DATA_PARALLEL, zero_stage=1))
    assert notes_of(whole, DATA_PARALLEL) == notes_of(whole, PIPELINE) == ()
    differs = replace(graph, dissolved=(DIFFERS_SHARDED,))
    assert "otherwise than whole ones" in only_note(differs, replace(DATA_PARALLEL, zero_stage=1))
    assert notes_of(differs, DATA_PARALLEL) == ()
    assert differs.content_hash() == graph.content_hash()
    assert whole.content_hash() == graph.content_hash()  # plans of the same model fit both


def test_an_optimizer_that_could_not_be_tried_is_stated_with_why():
    graph = graph_of()
    failed = replace(graph, optimizer_failure="ValueError: Invalid learning rate: -1")
    assert "it fails on a matrix and a bias (ValueError: Invalid learning rate: -1)" in only_note(failed, ONE_PROCESS)
    assert failed.content_hash() == graph.content_hash()


def test_batch_norm_in_evaluation_mode_is_like_any_other_layer():
    graph = graph_of(lambda: Calling(lambda layer, x: F.batch_norm(layer(x), x.new_zeros(WIDTH), x.new_ones(WIDTH))))
    assert notes_of(graph) == ()


def masked_mean(outputs, targets):
    losses, mask = F.cross_entropy(outputs, targets, reduction="none"), targets > 0
    return (losses * mask).sum() / mask.sum()


def root(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none").mean().sqrt()


def balanced(outputs, targets):
    shares = outputs.softmax(-1)
    return F.cross_entropy(outputs, targets, reduction="none").mean() + (shares.mean(0) * shares.mean(0)).sum()


@pytest.mark.parametrize("loss_fn", [masked_mean, root, balanced])
def test_what_is_not_linear_in_sums_over_samples_is_told(loss_fn):
    note = only_note(graph_of(loss_fn=loss_fn))
    assert "Samples of a batch are put together" in note
    assert ("loss_average=global_batch keep it" in note) == (loss_fn is masked_mean)
    assert notes_of(graph_of(loss_fn=loss_fn), ONE_PROCESS) == ()


def centred(layer, x):
    y = layer(x)
    return y - y.mean(0).expand(y.shape[0], -1)


def centred_as(layer, x):
    y = layer(x)
    return y - y.mean(0).expand_as(y)


@pytest.mark.parametrize("function", [centred, centred_as])
def test_a_mean_over_samples_that_each_sample_gets_is_told(function):
    assert "Samples of a batch are put together" in only_note(graph_of(lambda: Calling(function)))


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: x.new_full((WIDTH, WIDTH), -1.0).triu(1),
        lambda x: torch.full((WIDTH, WIDTH), -1.0, device=x.device).triu(1).type_as(x),
    ],
)
def test_a_mask_that_takes_its_dtype_from_samples_mixes_none(mask):
    assert notes_of(graph_of(lambda: Calling(lambda layer, x: layer(x) @ mask(x)))) == ()


def test_every_statement_is_one_sentence():
    def everything():
        parts = (nn.Dropout(), Calling(in_checkpoint), Calling(in_autocast), Calling(signed), Remembering())
        return nn.Sequential(nn.BatchNorm1d(WIDTH), *parts, Calling(lambda layer, x: x + torch.rand_like(x)))

    def loss_fn(outputs, targets):
        return F.cross_entropy(outputs, targets, ignore_index=0) + (outputs - outputs.mean(0)).square().sum()

    graph = graph_of(everything, loss_fn)
    graph = replace(graph, dissolved=(*graph.dissolved, WHOLE_OPTIMIZER), optimizer_failure="ValueError")
    both = {"grad_compression": "bf16"}, {"grad_compression": "powersgd", "powersgd_rank": 4}
    for mesh, compression in zip((DATA_PARALLEL, PIPELINE), both, strict=True):
        found = notes_of(graph, replace(mesh, tp=2), precision="bf16", **compression)
        assert len(found) == len(STATEMENTS)
        for note in found:
            assert note.endswith(".")
            assert ". " not in note


def test_notes_are_in_every_form_of_the_report(answer):
    noted = replace(answer, notes=("First <note>.", "Second note."))
    for text in (plan_report(noted), explain_report(noted), program_header(noted, launch_line="torchrun train.py")):
        assert "- First <note>.\n- Second note." in text
        assert "Not as in one process" not in text.replace("Not as in one process", "", 1)
    assert "<li>First &lt;note&gt;.</li>" in plan_page(noted)
    assert json.loads(answer_to_json(noted))["notes"] == ["First <note>.", "Second note."]
    assert answer_from_json(answer_to_json(noted)).notes == noted.notes


def test_without_notes_no_report_has_a_heading_for_them(answer):
    for text in (plan_report(answer), explain_report(answer), plan_page(answer)):
        assert "Not as in one process" not in text
    assert answer_to_dict(answer)["notes"] == []


def test_fix_knows_both_ways_of_batch_norm():
    for way in ("local", "synchronized"):
        check_options(Options(fix=(("batch_norm", way),)))
    with pytest.raises(Exception, match="expected: one of local, synchronized"):
        check_options(Options(fix=(("batch_norm", "global"),)))
