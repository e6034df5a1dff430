"""Every rule of `cost_models/` on real shards: each strategy against the whole op, forward and gradient, in fp64.

All ranks run in this process: operands are laid out by the strategy, the op is run as the generated program would print
it, and results and gradients are put together again as their layouts say. What an op writes in place is compared too.
"""

import importlib
import threading
import types
from functools import cache

import pytest
import torch
import torch.distributed as dist
from rule_calls import CALLS
from rule_calls.toys import operator
from torch import nn
from torch.nn import functional as F

from autoplan.codegen.call import Call
from autoplan.codegen.expressions import FUNCTION_MODULES, FUNCTIONS, expression
from autoplan.codegen.forward import printed_spec
from autoplan.graph import COMPUTE, PADDED_LINEAR, GraphFacts, PerSample, Ref, Symbol, extent_at
from autoplan.layout import D, R, local_spec, sharded
from autoplan.rules import forward_flops, load_rules, operand_names
from autoplan.runtime.tensor_parallel import attention, collectives, experts, vocabulary
from autoplan.tensor_parallel.op_strategies import legal_strategies
from autoplan.tracing.model_source import module_source
from autoplan.tracing.trace import trace_model

experts.use_float64_grouped_products()
RULES = load_rules()
BATCH, DEGREES = 4, (2, 3, 4)
X = (8, 12)  # sizes that 2, 3 and 4 shards divide in part
# Rules that split nothing in any layout: what they compute needs its operands whole, or reads none.
NEVER_SPLIT = {
    "aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.eye.default", "aten.eye.m",
    "aten.linspace.default", "aten.scalar_tensor.default", "aten.cosine_embedding_loss.default",
    "aten.ctc_loss.Tensor",
    "aten.margin_ranking_loss.default", "aten.triplet_margin_loss.default", "aten.lstm.input", "aten.gru.input",
    "aten.rnn_tanh.input", "aten.rnn_relu.input", "aten.lstm_cell.default", "aten.gru_cell.default",
    "aten.rnn_tanh_cell.default", "aten.rnn_relu_cell.default", "aten.copy_.default", "aten.all.default",
    "aten.any.default",
    "aten.max.default", "aten.min.default", "aten.mean.default", "aten.prod.default", "aten.norm.Scalar",
    "aten.histc.default", "aten.nll_loss.default",
}  # fmt: skip
UNDEFINED = {"aten.empty_like.default"}  # what they hold means nothing
# Not called here: pieces of results are checked with the op that makes them, modules as ops in test_module_level.
NOT_CALLED = {"getitem", PADDED_LINEAR} | {target for target in RULES if target.startswith("module.")}


class Calls(nn.Module):
    """Ops on a tensor that carries a gradient; `shapes` become trainable operands, or buffers if they start with 0."""

    def __init__(self, function, shapes):
        super().__init__()
        self.function, self.names = function, []
        for number, shape in enumerate(shapes):
            name, value = f"weight_{number}", torch.rand(shape[1:] if shape[:1] == (0,) else shape) + 0.5
            self.names.append(name)
            if shape[:1] == (0,):
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value))

    def forward(self, x):
        return self.function(x * 1.0, *(getattr(self, name) for name in self.names))


def total(outputs, targets):
    outputs = outputs if isinstance(outputs, tuple | list) else [outputs]
    return sum(output.to(torch.float64).sum() for output in outputs) + 0.0 * targets.sum()


@cache
def traced(name):
    torch.manual_seed(0)
    function, shapes = CALLS[name]
    batch = (torch.zeros(2, *X), torch.zeros(2))
    return trace_model(module_source(Calls(function, shapes), batch, total))


def whole_values(graph, seed=0):
    """A random value for every input and parameter, and from them every value, at BATCH samples."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for item in (*graph.inputs, *graph.parameters):
        values[item.name] = torch.rand(item.spec.at(BATCH), generator=generator, dtype=torch.float64) + 0.1
    for op in graph.ops:
        operands = [value.clone() if isinstance(value, torch.Tensor) else value for value in operands_of(op, values)]
        values[op.name] = run(op, operands, op.outputs[0])
    return values


def operands_of(op, values):
    return [values[name] for name in operand_names(op)]


def run(op, operands, result, *, function="", tp=None, n_unpadded=None):
    """The op on these tensors, printed as the generated program prints it."""
    names = [f"v{i}" for i in range(len(operands))]
    like = torch.zeros((), dtype=torch.float64)
    call = Call(op, tuple(names), result, "like", "like", batch=str(BATCH), tp="tp", n_unpadded=n_unpadded)
    text = FUNCTIONS[function](call) if function else expression(call)
    known = {"torch": torch, "F": F, "like": like, "tp": tp, "self": types.SimpleNamespace(training=True)}
    home = importlib.import_module(f"autoplan.runtime.tensor_parallel.{FUNCTION_MODULES.get(function, 'collectives')}")
    functions = {function: getattr(home, function)} if function else {}
    return eval(text, {**known, **functions, **dict(zip(names, operands, strict=True))})


def printed(op, operands):
    """The whole op, as the generated program prints it."""
    return run(op, operands, op.outputs[0])


# ---------------------------------------------------------------- layouts


def ends_of(op, strategy, values, degree):
    """Where the rows of each expert end under layout E: as the op says, and any division where it does not."""
    if op.target == "aten._grouped_mm.default":
        return operands_of(op, values)[2]
    pairs = zip((*operands_of(op, values), values[op.name]), (*strategy.operands, strategy.result), strict=True)
    n_rows = next((len(value) for value, layout in pairs if layout.kind == "E"), 0)
    return torch.tensor([n_rows * rank // degree for rank in range(1, degree + 1)], dtype=torch.int32)


def shard_of_expert_rows(tensor, ends, rank, degree):
    """The rows of a rank's experts, which has as many as any other rank."""
    bounds = [0, *ends.tolist()][:: len(ends) // degree]
    return tensor[bounds[rank] : bounds[rank + 1]]


def shard(tensor, layout, rank, degree, filler=0.0):
    """What a rank holds of a value; of a partial value a part that is different on each rank. `filler` is padding."""
    if layout.kind == "P":
        if not tensor.is_floating_point():
            return tensor if rank == 0 else torch.zeros_like(tensor)
        return tensor * (rank + 1) / (degree * (degree + 1) / 2)
    if layout.kind != "S":
        return tensor
    if layout.is_padded:
        return _padded(tensor, layout.dim, degree, filler).chunk(degree, dim=layout.dim)[rank]
    blocks = tensor.tensor_split(layout.blocks, dim=layout.dim)
    return torch.cat([block.tensor_split(degree, dim=layout.dim)[rank] for block in blocks], dim=layout.dim)


def _padded(tensor, dim, degree, filler):
    missing = -tensor.shape[dim] % degree
    shape = (*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :])
    return torch.cat([tensor, torch.full(shape, filler, dtype=tensor.dtype)], dim)


def unshard(parts, layout, size=None):
    """The whole value (or, for V and P, the sum); `size` is the extent of a padded dim."""
    if layout.kind in ("V", "P"):
        return sum(parts)
    if layout.kind == "R":
        return parts[0]
    if layout.is_padded:
        return torch.cat(parts, dim=layout.dim).narrow(layout.dim, 0, size)
    blocks = [part.tensor_split(layout.blocks, dim=layout.dim) for part in parts]
    return torch.cat([torch.cat(row, dim=layout.dim) for row in zip(*blocks, strict=True)], dim=layout.dim)


def assert_is_whole(parts, layout, whole):
    """The ranks' values make up the whole one."""
    size = whole.shape[layout.dim] if layout.is_padded else None
    found = parts[0] if layout.kind == "V" else unshard(parts, layout, size)
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9, check_dtype=layout.kind != "P")


def assert_is_whole_gradient(parts, layout, whole):
    """The whole gradient of an operand: of R and P every rank holds it, of V the ranks' sum to it; of padding, 0."""
    size = whole.shape[layout.dim] if layout.is_padded else None
    parts = [torch.zeros_like(whole) if part is None else part for part in parts]
    for part in parts if layout.kind in ("R", "P") else parts[:1]:
        found = part if layout.kind in ("R", "P") else unshard(parts, layout, size)
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)
    if layout.is_padded:
        padding = torch.cat(parts, dim=layout.dim).narrow(layout.dim, size, -size % len(parts))
        assert not padding.any()


def gradient_for(gradient, layout, rank, degree):
    """The gradient that arrives at a result of this layout on a rank."""
    if layout.kind == "P":
        return gradient
    if layout.kind == "V":
        return shard(gradient, type(layout)("P"), rank, degree)
    return shard(gradient, layout, rank, degree)


# ---------------------------------------------------------------- ranks


class Ranks:
    """The ranks of one group as threads of this process: what collectives need of `torch.distributed`."""

    def __init__(self, degree):
        self.degree, self.barrier, self.tensors = degree, threading.Barrier(degree, timeout=60), [None] * degree
        self.ReduceOp = dist.ReduceOp

    def all_reduce(self, x, *, op=dist.ReduceOp.SUM, group):
        self.tensors[group.rank()] = x.clone()
        self.barrier.wait()
        stacked = torch.stack(self.tensors)
        x.copy_(stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0))
        self.barrier.wait()

    def all_to_all_single(self, arriving, leaving, *, output_split_sizes, input_split_sizes, group):
        self.tensors[group.rank()] = leaving.split(input_split_sizes)
        self.barrier.wait()
        found = torch.cat([sent[group.rank()] for sent in self.tensors])
        assert [len(sent[group.rank()]) for sent in self.tensors] == output_split_sizes
        arriving.copy_(found)
        self.barrier.wait()

    def group(self, rank):
        return types.SimpleNamespace(rank=lambda: rank, size=lambda: self.degree)

    def one_by_one(self, function):
        """function(group) of every rank that needs nothing of the others; the results in order."""
        return [function(self.group(rank)) for rank in range(self.degree)]

    def each(self, function):
        """function(group) on every rank, all at once; the results in order."""
        results, errors = [None] * self.degree, []

        def of_rank(rank):
            try:
                results[rank] = function(self.group(rank))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(self.degree)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


# ---------------------------------------------------------------- the check


def differentiable(value, name, gradients):
    return value.detach().clone().requires_grad_(name in gradients and value.is_floating_point())


def as_tuple(value):
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def backward(results, seeds):
    pairs = [(result, seed) for result, seed in zip(results, seeds, strict=True) if result.requires_grad]
    torch.autograd.backward([result for result, _ in pairs], [seed for _, seed in pairs])


def seeds_of(results):
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(result.shape, generator=generator, dtype=torch.float64).to(result.dtype) for result in results]


def given(argument, operands):
    """An argument of the traced call as the operator takes it; `operands` are those still to come."""
    if isinstance(argument, Ref):
        return next(operands)
    if isinstance(argument, tuple):
        return [given(item, operands) for item in argument]
    if isinstance(argument, PerSample):
        return argument.count * BATCH
    if isinstance(argument, Symbol):
        name = argument.text.removeprefix("dtype:")
        names = {"device": torch.device("cpu"), COMPUTE: torch.float64}
        return names[name] if name in names else getattr(torch, name.removeprefix("torch."))
    return argument


def called(op, operands):
    """The operator itself on these tensors, not as it is printed."""
    rest = iter(operands)
    arguments = [given(argument, rest) for argument in op.args]
    keywords = {key: given(argument, rest) for key, argument in op.kwargs}
    return operator(op.target.removeprefix("aten."))(*arguments, **keywords)


def computed_whole(op, values, facts, *, run=printed):
    """The operands, with their gradients, the results and the gradients that arrived at these."""
    operands = [differentiable(values[name], name, facts.gradients) for name in operand_names(op)]
    results = as_tuple(run(op, operands))
    seeds = seeds_of(results)
    if any(result.requires_grad for result in results):
        backward(results, seeds)
    return operands, results, seeds


def check_strategy(op, strategy, values, facts, degree, monkeypatch, filler=0.0, computed=None):
    """`computed` is what `computed_whole` gives, which is the same for all strategies of an op."""
    names, ends = operand_names(op), ends_of(op, strategy, values, degree)
    whole, expected, seeds = computed or computed_whole(op, values, facts)
    has_gradient = any(result.requires_grad for result in expected)
    # what is returned beside a split result lies like it, or has other dims and is whole
    layouts = [strategy.result if result.dim() == expected[0].dim() else R for result in expected]
    padded = [values[n].shape[y.dim] for n, y in zip(names, strategy.operands, strict=True) if y.is_padded]

    def on_rank(group):
        rank = group.rank()
        pairs = zip(names, strategy.operands, strict=True)
        parts = [
            (shard_of_expert_rows(values[n], ends, rank, degree), n)
            if layout.kind == "E"
            else (shard(values[n], layout, rank, degree, filler), n)
            for n, layout in pairs
        ]
        local = [differentiable(part, n, facts.gradients) for part, n in parts]
        result = printed_spec(op.outputs[0], strategy.result, degree)
        n_unpadded = padded[0] if padded else None
        found = as_tuple(run(op, local, result, function=strategy.function, tp=group, n_unpadded=n_unpadded))
        if has_gradient:
            arriving = [
                shard_of_expert_rows(seed, ends, rank, degree)
                if strategy.result.kind == "E"
                else gradient_for(seed, layout, rank, degree)
                for seed, layout in zip(seeds, layouts, strict=True)
            ]
            backward(found, arriving)
        return found, local

    ranks = Ranks(degree)
    monkeypatch.setattr(collectives, "dist", ranks)
    monkeypatch.setattr(attention, "dist", ranks)
    monkeypatch.setattr(vocabulary, "dist", ranks)
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank())
    found = (ranks.each if strategy.function else ranks.one_by_one)(on_rank)
    for index, result in enumerate(expected):
        parts = [results[index].detach() for results, _ in found]
        if strategy.result.kind == "E":
            parts = [torch.cat(parts)]
        if op.target not in UNDEFINED:
            assert_is_whole(parts, R if strategy.result.kind == "E" else layouts[index], result.detach())
    for index, (operand, layout) in enumerate(zip(whole, strategy.operands, strict=True)):
        parts = [local[index] for _, local in found]
        if operand.grad is not None and layout.kind == "E":
            torch.testing.assert_close(torch.cat([part.grad for part in parts]), operand.grad, rtol=1e-9, atol=1e-9)
        elif operand.grad is not None:
            assert_is_whole_gradient([part.grad for part in parts], layout, operand.grad)
        if layout.kind in "RS":
            assert_is_whole([part.detach() for part in parts], layout, operand.detach())


def strategies_of(graph, degree):
    """(op, strategies) of every op of the graph that can be run by itself."""
    facts = GraphFacts.of(graph)
    found = legal_strategies(graph.ops, facts.specs, facts.gradients, degree, RULES)
    return [
        (op, [s for s in strategies if D not in (*s.operands, s.result)])  # several ops at once: see test_experts
        for op, strategies in found.items()
        if op.target != "getitem"
    ]


@pytest.mark.parametrize(
    "degrees", [DEGREES[:2], pytest.param(DEGREES[2:], marks=pytest.mark.nightly)], ids=["2 and 3", "4"]
)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_every_strategy_of_the_rule_equals_the_whole_op(name, degrees, monkeypatch):
    graph = traced(name)
    facts, values = GraphFacts.of(graph), whole_values(graph)
    computed = {}
    for degree in degrees:
        for op, strategies in strategies_of(graph, degree):
            if op.name not in computed:
                computed[op.name] = computed_whole(op, values, facts)
            for strategy in strategies:
                try:
                    check_strategy(op, strategy, values, facts, degree, monkeypatch, computed=computed[op.name])
                except Exception as error:
                    layouts = ", ".join(map(str, strategy.operands))
                    error.add_note(f"{op.target} {op.args}: {layouts} -> {strategy.result} on {degree}")
                    raise


PRINTED_OTHERWISE = {"aten.histc.default"}  # of integers, which torch counts on GPUs only


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_every_call_is_printed_as_what_its_operator_computes(name):
    graph = traced(name)
    facts, values = GraphFacts.of(graph), whole_values(graph)
    for op in graph.ops:
        if not op.target.startswith("aten.") or op.target in UNDEFINED | PRINTED_OTHERWISE:
            continue
        (operands, results, _), (wanted_operands, wanted, _) = (
            computed_whole(op, values, facts, run=way) for way in (printed, called)
        )
        gradients, wanted_gradients = ([x.grad for x in side] for side in (operands, wanted_operands))
        for found, expected in zip((*results, *gradients), (*wanted, *wanted_gradients), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True, msg=str(op))


@pytest.mark.filterwarnings("ignore")
def test_every_rule_is_called_and_splits_something_unless_it_cannot():
    called, split = set(), set()
    for name in CALLS:
        for degree in DEGREES:
            for op, strategies in strategies_of(traced(name), degree):
                called.add(op.target)
                layouts = [layout for s in strategies for layout in (*s.operands, s.result)]
                split |= {op.target} if any(layout.kind == "S" for layout in layouts) else set()
    assert set(RULES) - called == NOT_CALLED
    assert (called & set(RULES)) - split == NEVER_SPLIT


def test_a_piece_of_a_result_lies_as_the_result():
    graph = traced("split")
    facts = GraphFacts.of(graph)
    for op, strategies in legal_strategies(graph.ops, facts.specs, facts.gradients, 2, RULES).items():
        if op.target == "getitem":
            assert all(strategy.operands == (strategy.result,) for strategy in strategies)


@pytest.mark.parametrize(("name", "dim"), [("split", 2), ("chunk", 1)])
def test_a_dim_cut_in_equal_pieces_may_be_sharded_in_as_many_blocks(name, dim):
    graph = traced(name)
    facts = GraphFacts.of(graph)
    (op,) = [op for op in graph.ops if len(op.outputs) > 1]
    found = legal_strategies(graph.ops, facts.specs, facts.gradients, 2, RULES)[op]
    assert sharded(dim, 2) in [s.operands[0] for s in found]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_a_rank_that_splits_a_product_does_its_share_of_it(name):
    graph = traced(name)
    for degree in DEGREES:
        for op, strategies in strategies_of(graph, degree):
            if op.target not in RULES or RULES[op.target].efficiency != "matmul":
                continue
            whole = tuple(graph.specs()[n] for n in operand_names(op))
            total_flops = forward_flops(RULES[op.target], op, operands=whole, batch_size=BATCH)
            for strategy in (s for s in strategies if s.is_split):
                local = tuple(local_spec(spec, y, degree) for spec, y in zip(whole, strategy.operands, strict=True))
                flops = forward_flops(RULES[op.target], op, operands=local, batch_size=BATCH, whole_operands=whole)
                # padding is less than one row more per rank
                assert total_flops <= degree * flops < 2 * total_flops, (op.target, strategy)


def test_flops_of_products_and_attention_by_hand():
    def flops(name, target):
        graph = traced(name)
        op = next(op for op in graph.ops if op.target == target)
        operands = tuple(graph.specs()[n] for n in operand_names(op))
        return forward_flops(RULES[target], op, operands=operands, batch_size=BATCH)

    # 2 * (4 samples * 8 rows) * 12 * 24
    assert flops("linear", "aten.linear.default") == 2 * 32 * 12 * 24
    # causal: half of 2 * 4 samples * 4 heads * 8 * 8 * (3 + 3)
    assert flops("attention", "aten.scaled_dot_product_attention.default") == 4 * 4 * 8 * 8 * 6


def test_extents_of_a_batch_are_multiples_of_it():
    graph = traced("reshape to fewer")
    spec = graph.specs()[graph.model_outputs[0]]
    assert [extent_at(extent, 3) for extent in spec.shape] == [3, 96]
