"""Every rule of `cost_models/` on real shards: each strategy against the whole op, forward and gradient, in fp64.

All ranks run in this process, one after the other: operands are laid out by the strategy, the op is run as the
generated program would print it, and results and gradients are put together again as their layouts say.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoplan.codegen.expressions import Call, expression
from autoplan.graph import GraphFacts, extent_at
from autoplan.layout import local_spec, sharded
from autoplan.rules import forward_flops, operand_names
from autoplan.sharding import legal_strategies
from autoplan.space import load_rules
from autoplan.trace import module_source, trace_model

RULES = load_rules()
BATCH = 4


class Calls(nn.Module):
    """One op on a tensor that carries a gradient; `parameters` shapes become its trainable operands."""

    def __init__(self, function, shapes):
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(shape) + 0.5) for shape in shapes)

    def forward(self, x):
        return self.function(x * 1.0, *self.weights)


X = (8, 12)  # sizes that 2, 3 and 4 shards divide in part
# target -> (function of x: [batch, 8, 12] and the parameters, shapes of the parameters)
UNARY = ("exp", "log", "sqrt", "rsqrt", "sin", "cos", "abs", "square", "tanh", "sigmoid", "neg", "relu")


def scaled(function):
    """The function of x times a parameter."""
    return lambda x, w: function(x * w)


CASES = {
    **{name: (scaled(getattr(torch, name)), [(12,)]) for name in UNARY},
    "linear": (lambda x, w, b: F.linear(x, w, b), [(24, 12), (24,)]),
    "linear without bias": (lambda x, w: F.linear(x, w), [(24, 12)]),
    "matmul": (lambda x, w: x @ (w * 1.0), [(12, 24)]),
    "bmm": (lambda x, w: torch.bmm(x, (x * w).transpose(1, 2)), [(12,)]),
    "gelu": (lambda x, w: F.gelu(x * w), [(12,)]),
    "silu": (lambda x, w: F.silu(x * w), [(12,)]),
    "softplus": (lambda x, w: F.softplus(x * w), [(12,)]),
    "clamp": (lambda x, w: torch.clamp(x * w, 0.2, 0.9), [(12,)]),
    "pow": (lambda x, w: (x * w) ** 3, [(12,)]),
    "add": (lambda x, w: x + w, [(12,)]),
    "add broadcast rows": (lambda x, w: x + w, [(8, 1)]),
    "sub": (lambda x, w: x - w, [(8, 12)]),
    "mul": (lambda x, w: x * w, [(12,)]),
    "div": (lambda x, w: x / w, [(12,)]),
    "where": (lambda x, w: torch.where(x > 0.5, x * w, x), [(12,)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (12,), w, b), [(12,), (12,)]),
    "rms norm": (lambda x, w: F.rms_norm(x, (12,), w), [(12,)]),
    "softmax": (lambda x, w: torch.softmax(x * w, dim=-1), [(12,)]),
    "softmax over rows": (lambda x, w: torch.softmax(x * w, dim=1), [(12,)]),
    "log softmax": (lambda x, w: torch.log_softmax(x * w, dim=-1), [(12,)]),
    "attention": (
        lambda x, w: F.scaled_dot_product_attention(
            *[(x * w).reshape(-1, 8, 4, 3).transpose(1, 2)] * 3, is_causal=True
        ),
        [(12,)],
    ),
    "sum": (lambda x, w: (x * w).sum(dim=1), [(12,)]),
    "sum keeping": (lambda x, w: (x * w).sum(dim=2, keepdim=True), [(12,)]),
    "mean": (lambda x, w: (x * w).mean(dim=1), [(12,)]),
    "reshape": (lambda x, w: (x * w).reshape(-1, 8, 4, 3), [(12,)]),
    "reshape to fewer": (lambda x, w: (x * w).reshape(-1, 96), [(12,)]),
    "flatten": (lambda x, w: (x * w).flatten(1, 2), [(12,)]),
    "transpose": (lambda x, w: (x * w).transpose(1, 2), [(12,)]),
    "permute": (lambda x, w: (x * w).permute(2, 0, 1), [(12,)]),
    "unsqueeze": (lambda x, w: (x * w).unsqueeze(1), [(12,)]),
    "select": (lambda x, w: (x * w)[:, 3], [(12,)]),
    "slice": (lambda x, w: (x * w)[:, 2:6], [(12,)]),
    "expand": (lambda x, w: (x * w).sum(1, keepdim=True).expand(-1, 5, -1), [(12,)]),
    "cat": (lambda x, w: torch.cat((x * w, x), dim=1), [(12,)]),
    "split": (lambda x, w: torch.add(*(x * w).split(6, dim=2)), [(12,)]),
    "chunk": (lambda x, w: torch.mul(*(x * w).chunk(2, dim=1)), [(12,)]),
    "contiguous": (lambda x, w: (x * w).transpose(1, 2).contiguous(), [(12,)]),
    "clone": (lambda x, w: (x * w).clone(), [(12,)]),
    "embedding": (lambda x, w: F.embedding((x[:, :, 0] * 5).long(), w), [(12, 24)]),
}


def traced(name):
    torch.manual_seed(0)
    function, shapes = CASES[name]
    module = Calls(function, shapes).double()
    batch = (torch.zeros(2, *X), torch.zeros(2))
    return trace_model(module_source(module, batch, lambda outputs, targets: outputs.sum() + 0.0 * targets.sum()))


def whole_values(graph, seed=0):
    """A random value for every input and parameter, and from them every value, at BATCH samples."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for item in (*graph.inputs, *graph.parameters):
        values[item.name] = torch.rand(item.spec.at(BATCH), generator=generator, dtype=torch.float64) + 0.1
    for op in graph.ops:
        values[op.name] = run(op, [values[n] for n in operand_names(op)], op.outputs[0])
    return values


def run(op, operands, result):
    """The op on these tensors, printed as the generated program prints it."""
    names = [f"v{i}" for i in range(len(operands))]
    call = Call(op, tuple(names), result, dtype_like="like", device_like="like", batch=str(BATCH))
    like = torch.zeros((), dtype=torch.float64)
    return eval(expression(call), {"torch": torch, "F": F, "like": like, **dict(zip(names, operands, strict=True))})


def shard(tensor, layout, rank, degree):
    """What a rank holds of a value; of a partial value a part that is different on each rank."""
    if layout.kind == "P":
        return tensor * (rank + 1) / (degree * (degree + 1) / 2)
    if layout.kind != "S":
        return tensor
    blocks = tensor.tensor_split(layout.blocks, dim=layout.dim)
    return torch.cat([block.tensor_split(degree, dim=layout.dim)[rank] for block in blocks], dim=layout.dim)


def unshard(parts, layout):
    """The whole value (or, for V and P, the sum)."""
    if layout.kind in ("V", "P"):
        return sum(parts)
    if layout.kind == "R":
        return parts[0]
    blocks = [part.tensor_split(layout.blocks, dim=layout.dim) for part in parts]
    return torch.cat([torch.cat(row, dim=layout.dim) for row in zip(*blocks, strict=True)], dim=layout.dim)


def value_of(parts, layout):
    return parts[0] if layout.kind == "V" else unshard(parts, layout)


def gradient_of(parts, layout):
    """The whole gradient of an operand: of R and P every rank holds it, of V the ranks' sum to it."""
    return parts[0] if layout.kind == "P" else unshard(parts, layout)


def gradient_for(gradient, layout, rank, degree):
    """The gradient that arrives at a result of this layout on a rank."""
    if layout.kind == "P":
        return gradient
    if layout.kind == "V":
        return shard(gradient, type(layout)("P"), rank, degree)
    return shard(gradient, layout, rank, degree)


def differentiable(value, name, gradients):
    return value.detach().clone().requires_grad_(name in gradients and value.is_floating_point())


def check_strategy(op, strategy, values, facts, degree):
    names = operand_names(op)
    whole = [differentiable(values[name], name, facts.gradients) for name in names]
    expected = run(op, whole, op.outputs[0])
    seed = torch.rand(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    has_gradient = op.name in facts.gradients
    if has_gradient:
        expected.backward(seed)
    results, gradients = [], [[] for _ in names]
    for rank in range(degree):
        pairs = zip(names, strategy.operands, strict=True)
        local = [differentiable(shard(values[n], layout, rank, degree), n, facts.gradients) for n, layout in pairs]
        found = run(op, local, local_spec(op.outputs[0], strategy.result, degree))
        results.append(found.detach())
        if has_gradient:
            found.backward(gradient_for(seed, strategy.result, rank, degree))
            for column, operand in zip(gradients, local, strict=True):
                column.append(operand.grad)
    torch.testing.assert_close(value_of(results, strategy.result), expected.detach(), rtol=1e-9, atol=1e-9)
    for operand, parts, layout in zip(whole, gradients, strategy.operands, strict=True):
        if operand.grad is not None:
            torch.testing.assert_close(gradient_of(parts, layout), operand.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_every_strategy_of_the_rule_equals_the_whole_op(name):
    graph = traced(name)
    facts, values = GraphFacts.of(graph), whole_values(graph)
    n_split = 0
    for degree in (2, 3, 4):
        for op, strategies in legal_strategies(graph.ops, facts.specs, facts.gradients, degree, RULES).items():
            if len(op.outputs) > 1 or op.target == "getitem" or op.name == graph.loss:
                continue
            for strategy in strategies:
                if not strategy.function:
                    check_strategy(op, strategy, values, facts, degree)
                    n_split += strategy.result.kind in "SP"
    assert n_split > 0 or name == "embedding"


@pytest.mark.parametrize(("name", "dim"), [("split", 2), ("chunk", 1)])
def test_a_dim_cut_in_equal_pieces_may_be_sharded_in_as_many_blocks(name, dim):
    graph = traced(name)
    facts, values = GraphFacts.of(graph), whole_values(graph)
    (op,) = [op for op in graph.ops if len(op.outputs) > 1]
    found = legal_strategies(graph.ops, facts.specs, facts.gradients, 2, RULES)[op]
    (blocked,) = [s for s in found if s.operands[0] == sharded(dim, 2)]
    source = values[operand_names(op)[0]]
    pieces = [
        run(op, [shard(source, blocked.operands[0], rank, 2)], local_spec(op.outputs[0], blocked.result, 2))
        for rank in range(2)
    ]
    for index, expected in enumerate(values[op.name]):
        torch.testing.assert_close(unshard([p[index] for p in pieces], blocked.result), expected)


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


def test_every_entry_is_an_equation_a_view_a_factory_or_has_strategies():
    for target, rule in RULES.items():
        is_factory = rule.n_backward_kernels == 0
        assert rule.equation is not None or rule.strategies is not None or rule.is_view or is_factory, target


def test_extents_of_a_batch_are_multiples_of_it():
    graph = traced("reshape to fewer")
    spec = graph.specs()[graph.model_outputs[0]]
    assert [extent_at(extent, 3) for extent in spec.shape] == [3, 96]
