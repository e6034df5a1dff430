"""The user's optimizer is tried on parts of tensors: those that treat each element by itself do not see the parts."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from distributed.launch import run_ranks
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Rprop

from autoplan import api
from autoplan.cost.price import make_pricer
from autoplan.errors import InputError, UsageError
from autoplan.graph import DIFFERS_SHARDED, FAILS_SHARDED, OPTIMIZER_WORDS, WHOLE_OPTIMIZER
from autoplan.hardware import load_hardware_profile
from autoplan.options import Options
from autoplan.parallel_plan import Mesh
from autoplan.planning.problem import trace_model
from autoplan.rules import load_rules
from autoplan.runtime import Config, PlainTraining
from autoplan.runtime.update.optimizer import naming_distributed_tensors
from autoplan.space.priced import priced_space
from autoplan.tracing import optimizer_trial
from autoplan.tracing.optimizer_trial import (
    computes_with_whole_tensors,
    n_states_of,
    trouble_with_shards,
    with_optimizer,
)

CPU = torch.device("cpu")
MLP = Path(__file__).parent.parent / "examples" / "mlp.py"


class RowNorms(SGD):
    """Divides each row's gradient by its norm."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.div_(parameter.grad.norm(dim=-1, keepdim=True))
        return super().step(closure)


class OwnNorm(SGD):
    """Divides each gradient by the norm of the part that this rank has."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad
            own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            own.div_(own.norm())
        return super().step(closure)


class Rebinding(SGD):
    """Gives parameters other memory, of which distributed tensors do not learn."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.1 * parameter.grad


class Noisy(SGD):
    """Adds noise to each gradient, as stochastic rounding does."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.add_(torch.randn_like(parameter.grad))
        return super().step(closure)


class Lars(SGD):
    """Scales each gradient by the norm of its parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(parameter.norm() / parameter.grad.norm())
        return super().step(closure)


class ByNumbersOfNorms(SGD):
    """The same, with numbers in Python: of a distributed tensor, each rank has another."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(parameter.norm().item() / parameter.grad.norm().item())
        return super().step(closure)


class Inner(torch.optim.Optimizer):
    """Its state is that of another."""

    def __init__(self, params):
        super().__init__(params, {})
        self.inner = AdamW(self.param_groups[0]["params"])

    def step(self, closure=None):
        return self.inner.step(closure)


class ByNumber:
    """A user's own, whose state is found by the numbers of parameters."""

    def __init__(self, params):
        self.param_groups, self.state = [{"params": params}], {}

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[id(parameter)] = parameter.detach().clone()


def in_groups(parameters):
    matrices = [p for p in parameters if p.ndim > 1]
    return AdamW([{"params": matrices}, {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}])


@pytest.mark.parametrize(
    "build_optimizer", [in_groups, lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: Adam(p, foreach=True)]
)
def test_optimizers_of_single_elements_do_not_see_whole_tensors(build_optimizer) -> None:
    assert not computes_with_whole_tensors(build_optimizer)


@pytest.mark.parametrize(
    "build_optimizer",
    [Adafactor, lambda p: Muon([matrix for matrix in p if matrix.ndim == 2]), lambda p: RowNorms(p, lr=0.1)],
)
def test_optimizers_of_norms_and_products_do(build_optimizer) -> None:
    assert computes_with_whole_tensors(build_optimizer)


def of_matrices(parameters):
    return Muon([parameter for parameter in parameters if parameter.ndim == 2], lr=0.1)


TROUBLES = (
    (in_groups, ""), (RowNorms, ""), (Lars, ""), (of_matrices, ""), (Adafactor, FAILS_SHARDED), (Rprop, FAILS_SHARDED),
    (OwnNorm, DIFFERS_SHARDED), (Rebinding, DIFFERS_SHARDED),
)  # fmt: skip


@pytest.mark.parametrize(("build_optimizer", "trouble"), [*TROUBLES, (ByNumbersOfNorms, FAILS_SHARDED)])
def test_what_it_does_with_shards_is_tried_on_ranks_that_leave_nothing_behind(build_optimizer, trouble) -> None:
    assert trouble_with_shards(build_optimizer) == trouble
    assert not dist.is_initialized()
    assert torch.ones(2).sum().item() == 2.0


def _troubles_of_two_processes():
    optimizer_trial._simulated_ranks = lambda: nullcontext(init_device_mesh("cpu", (2,)))
    return [trouble_with_shards(build_optimizer) for build_optimizer, _ in TROUBLES]


def test_simulated_ranks_find_what_processes_do() -> None:
    for found in run_ranks(_troubles_of_two_processes, 2):
        assert found == [trouble for _, trouble in TROUBLES]


def test_of_an_optimizer_that_draws_random_numbers_nothing_is_known() -> None:
    graph = trace_model(MLP)
    assert with_optimizer(graph, Noisy).dissolved == graph.dissolved
    assert set(with_optimizer(graph, OwnNorm).dissolved) - set(graph.dissolved) == {WHOLE_OPTIMIZER, DIFFERS_SHARDED}


@pytest.mark.usefixtures("one_rank")
def test_in_a_process_group_nothing_is_known_of_shards() -> None:
    assert trouble_with_shards(Adafactor) == ""
    assert dist.get_world_size() == 1


@pytest.mark.parametrize(
    ("build_optimizer", "n_states"),
    [
        (in_groups, 2),
        (lambda p: SGD(p, lr=0.1), 0),
        (lambda p: SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: AdamW(p, amsgrad=True), 3),
        (Adafactor, 0),  # vectors
        (RowNorms, 2),  # not torch's own: it may keep more elsewhere
        (lambda p: Inner(p), 2),
        (lambda p: ByNumber(p), 2),
    ],
)
def test_what_an_optimizer_keeps_is_counted(build_optimizer, n_states) -> None:
    assert n_states_of(build_optimizer) == n_states


MODEL = (
    "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\n"
    "loss_fn = F.mse_loss\n\n\n"
    "def build_model():\n    return nn.Linear(4, 4)\n\n\n"
    "def make_batch(n):\n    return torch.randn(n, 4), torch.randn(n, 4)\n\n\n"
)


@pytest.mark.parametrize(
    ("optimizer", "n_states"), [("AdamW(p)", 2), ("AdamW(p, amsgrad=True)", 3), ("SGD(p, lr=0.1)", 0)]
)
def test_the_price_counts_it(tmp_path, optimizer, n_states) -> None:
    model = tmp_path / "toy.py"
    model.write_text(f"{MODEL}def build_optimizer(p):\n    return torch.optim.{optimizer}\n")
    graph, hardware = trace_model(model), load_hardware_profile("h200_x4")
    price = make_pricer(graph, hardware=hardware, precision="bf16", shardings={}, rules=load_rules())
    costs = [choices[0] for choices in price(Mesh()).costs]
    n_elements, bandwidth = 4 * 4 + 4, hardware.device.copy_bytes_per_s
    assert sum(cost.state_bytes for cost in costs) == (4 + 4 * n_states) * n_elements
    updates_s = {n: n_elements * (4 * 4 + 2 * 4 * n) / bandwidth for n in (n_states, 2)}
    adams = make_pricer(
        replace(graph, n_optimizer_states=2), hardware=hardware, precision="bf16", shardings={}, rules=load_rules()
    )
    added_s = sum(cost.optimizer_s for cost in costs) - sum(own.optimizer_s for own, *_ in adams(Mesh()).costs)
    assert added_s == pytest.approx(updates_s[n_states] - updates_s[2])
    assert graph.content_hash() == replace(graph, n_optimizer_states=2).content_hash()


@pytest.mark.parametrize(
    ("optimizer", "words", "failure"),
    [
        ("Adafactor(parameters)", {WHOLE_OPTIMIZER, FAILS_SHARDED}, ""),
        ("Rprop(parameters)", {FAILS_SHARDED}, ""),
        ("AdamW(parameters)", set(), ""),
        ("AdamW(parameters, lr=-1)", set(), "ValueError: Invalid learning rate: -1 at "),
        ("AdamW(parameters.parameters())", set(), "AttributeError: 'list' object has no attribute 'parameters' at "),
        ("LBFGS(parameters)", set(), "TypeError: "),  # whose step wants a closure
    ],
)
def test_a_traced_model_file_tells_what_its_optimizer_does_or_how_it_fails(tmp_path, optimizer, words, failure) -> None:
    model = tmp_path / "toy.py"
    model.write_text(f"{MODEL}def build_optimizer(parameters):\n    return torch.optim.{optimizer}\n")
    graph = trace_model(model)
    assert OPTIMIZER_WORDS & {*graph.dissolved} == words
    assert graph.optimizer_failure.startswith(failure)
    assert graph.optimizer_failure.endswith(f"toy.py:17: return torch.optim.{optimizer}") is failure.endswith(" at ")


def problem_of(words, *, fix=()):
    """A model on two devices, with an optimizer of which these words are true."""
    options = Options(precision="fp32", global_batch=8, fix=fix)
    problem = api.make_problem(MLP, overrides={"width": 1024, "depth": 2}, hw="h200_x4/2", options=options)
    return replace(problem, graph=replace(problem.graph, dissolved=words))


@pytest.mark.parametrize(
    ("words", "fix", "zero_stages", "has_tp", "said"),
    [
        ((), (), (0, 1, 2, 3), True, []),
        ((FAILS_SHARDED,), (), (0,), True, ["ZeRO 1 to 3"]),
        ((FAILS_SHARDED,), (("zero", "0"),), (0,), True, []),
        ((DIFFERS_SHARDED,), (), (0,), True, ["ZeRO 1 to 3"]),
        ((DIFFERS_SHARDED,), (("zero", "1"),), (0, 1, 2, 3), True, []),
        ((DIFFERS_SHARDED,), (("shard", "2"),), (0, 1, 2, 3), True, []),
        ((WHOLE_OPTIMIZER,), (), (0, 1, 2, 3), False, ["Tensor parallelism"]),
        ((WHOLE_OPTIMIZER,), (("tp", "2"),), (0, 1, 2, 3), True, []),
        ((WHOLE_OPTIMIZER, FAILS_SHARDED), (), (0,), False, ["ZeRO 1 to 3", "Tensor parallelism"]),
    ],
)
def test_plans_divide_no_parameter_that_the_optimizer_needs_whole(words, fix, zero_stages, has_tp, said) -> None:
    problem = problem_of(words, fix=fix)
    space = priced_space(problem.graph, problem.hardware, problem.options, global_batch=8).space
    assert space.zero_stages == zero_stages
    assert (2 in dict(space.shardings)) is has_tp
    limits = api.solve(problem).workload.limits
    left_out = [sentence for sentence in limits if "left out, as the optimizer of build_optimizer" in sentence]
    assert [sentence.split(" w")[0] for sentence in left_out] == said


@pytest.mark.parametrize("fix", [(("zero", "1"),), (("shard", "2"),), (("zero", "3"), ("shard", "2"))])
def test_fixing_zero_is_refused_where_the_first_step_would_fail(fix) -> None:
    text = ",".join(f"{name}={value}" for name, value in fix)
    with pytest.raises(
        UsageError, match=f"--fix {text}: found 'an optimizer .* fails(.|\n)*expected: zero=0(.|\n)*fix: "
    ):
        api.solve(problem_of((FAILS_SHARDED,), fix=fix))


def test_and_so_is_a_plan_from_outside() -> None:
    fix = (("dp", "2"), ("zero", "1"))
    plan = api.solve(problem_of((DIFFERS_SHARDED,), fix=fix)).best.plan
    assert any("otherwise than whole ones" in note for note in api.score(problem_of((DIFFERS_SHARDED,)), plan).notes)
    with pytest.raises(InputError, match=r"mesh\.zero_stage: found 1\n  expected: 0, since the optimizer"):
        api.score(problem_of((FAILS_SHARDED,)), plan)


def test_a_comparison_forgets_gradients_that_the_optimizer_does_not_have() -> None:
    functions = {"build_optimizer": of_matrices, "loss_fn": nn.functional.mse_loss}
    model_file = SimpleNamespace(build_model=lambda: nn.Linear(2, 2), **functions)
    plain = PlainTraining(Config(precision="fp64", micro_batch_size=2), model_file, build_device=CPU, device=CPU)
    batch = torch.ones(2, 2), torch.ones(2, 2)
    found = []
    for _ in range(2):
        plain.optimizer.param_groups[0]["lr"] = 0.0
        plain.step(batch)
        found.append(plain.model.bias.grad.clone())
    assert torch.equal(*found)


def test_a_comparison_takes_an_eps_of_two_numbers_for_none() -> None:
    model_file = SimpleNamespace(build_model=lambda: nn.Linear(2, 2), build_optimizer=Adafactor)
    config = Config(precision="fp64", micro_batch_size=2)
    plain = PlainTraining(config, model_file, build_device=CPU, device=CPU)
    plain.add_drift("weight", 1e-3)
    assert plain.drifts == {"weight": pytest.approx(2.0 * 1e-2 * 1e-3)}  # the learning rate of Adafactor is 1e-2


@pytest.mark.parametrize(
    "words",
    [
        "Sharding propagation failed for aten.pow_.Scalar",  # torch 2.13
        "aten.pow_.Scalar: in-place operations that require placement changes are not supported",  # torch 2.11
        "Operator aten._foreach_copy_.default does not have a sharding strategy registered.",
    ],
)
def test_an_error_of_distributed_tensors_in_the_optimizer_says_what_can_be_done(words: str) -> None:
    with pytest.raises(RuntimeError) as raised, naming_distributed_tensors():
        raise RuntimeError(words)
    assert "--fix zero=0,tp=1" in raised.value.__notes__[0]
