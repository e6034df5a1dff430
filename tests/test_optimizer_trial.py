"""The user's optimizer is tried on parts of tensors: those that treat each element by itself do not see the parts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon

from autoplan.cost.price import make_pricer
from autoplan.graph import WHOLE_OPTIMIZER
from autoplan.hardware import load_hardware_profile
from autoplan.parallel_plan import Mesh
from autoplan.planning.problem import trace_model
from autoplan.rules import load_rules
from autoplan.runtime import Config, PlainTraining
from autoplan.runtime.update.optimizer import naming_distributed_tensors
from autoplan.tracing.optimizer_trial import computes_with_whole_tensors, n_states_of

CPU = torch.device("cpu")


class RowNorms(SGD):
    """Divides each row's gradient by its norm."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.div_(parameter.grad.norm(dim=-1, keepdim=True))
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
    ("optimizer", "is_whole", "failure"),
    [
        ("Adafactor(parameters)", True, ""),
        ("AdamW(parameters)", False, ""),
        ("AdamW(parameters, lr=-1)", False, "ValueError: Invalid learning rate: -1 at "),
        ("AdamW(parameters.parameters())", False, "AttributeError: 'list' object has no attribute 'parameters' at "),
        ("LBFGS(parameters)", False, "TypeError: "),  # whose step wants a closure
    ],
)
def test_a_traced_model_file_tells_what_its_optimizer_does_or_how_it_fails(
    tmp_path, optimizer, is_whole, failure
) -> None:
    model = tmp_path / "toy.py"
    model.write_text(f"{MODEL}def build_optimizer(parameters):\n    return torch.optim.{optimizer}\n")
    graph = trace_model(model)
    assert (WHOLE_OPTIMIZER in graph.dissolved) is is_whole
    assert graph.optimizer_failure.startswith(failure)
    assert graph.optimizer_failure.endswith(f"toy.py:17: return torch.optim.{optimizer}") is failure.endswith(" at ")


def test_a_comparison_forgets_gradients_that_the_optimizer_does_not_have() -> None:
    functions = {"build_optimizer": lambda p: Muon(p[:1]), "loss_fn": nn.functional.mse_loss}
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
    ],
)
def test_an_error_of_distributed_tensors_in_the_optimizer_says_what_can_be_done(words: str) -> None:
    with pytest.raises(RuntimeError) as raised, naming_distributed_tensors():
        raise RuntimeError(words)
    assert "--fix zero=0,tp=1" in raised.value.__notes__[0]
