"""Rules found by trial, and rules from a file of the user's own."""

from pathlib import Path

import pytest
import torch
from conftest import make_answer
from rule_calls import CALLS
from test_rules import Calls, X, total
from torch.nn import functional as F

import autoplan
from autoplan import api, live
from autoplan.cli import run
from autoplan.errors import InputError
from autoplan.graph import OpGraph
from autoplan.options import Options
from autoplan.report.plan import plan_report
from autoplan.rules import load_rules
from autoplan.tensor_parallel.rule_discovery import discover_rules, rules_text
from autoplan.tracing import trace as tracing
from autoplan.tracing.model_source import module_source
from autoplan.tracing.trace import trace_model
from autoplan.what_if import asking

MODEL = Path(__file__).parent / "families" / "custom_op.py"
ANY_BATCH = (torch.zeros(2, 4), torch.zeros(2, 4))
SOFT_CAP = "families.soft_cap.default"
RULE_FILE = f"""from autoplan.equations import broadcast_equation
from autoplan.rules import OpRule

RULES = {{"{SOFT_CAP}": OpRule(broadcast_equation, saves=(-1,))}}
"""


def graph_of(function, shapes) -> OpGraph:
    torch.manual_seed(0)
    return trace_model(module_source(Calls(function, shapes), (torch.zeros(2, *X), torch.zeros(2)), total))


def found(function, shapes, target) -> str:
    *_, line, _ = rules_text(discover_rules(graph_of(function, shapes), [target])).splitlines()
    return line.strip()


@pytest.mark.parametrize(
    ("function", "shapes", "target", "entry"),
    [
        # one letter per dim; the bias is added, since it must not be added once per rank
        (F.linear, [(24, 12), (24,)], "linear.default", '"a b d+, c d+, ~c -> a b c", linear_in=(0, 1), saves=(0, 1)'),
        # the kernel and the normalized dim stay whole
        (
            F.conv1d,
            [(6, 8, 3), (6,)],
            "conv1d.default",
            '"a c+ d^, b c+ e^, ~b -> a b f^", linear_in=(0, 1), saves=(0, 1)',
        ),
        (lambda x, w: torch.softmax(x * w, 1), [(12,)], "softmax.int", '"a c^ b -> a c^ b", saves=(-1,)'),
        (lambda x, w: torch.tanh(x * w), [(12,)], "tanh.default", "broadcast_equation, saves=(-1,)"),
        (lambda x, w: (x * w).sum(1), [(12,)], "sum.dim_IntList", '"a c+ b -> a b", linear_in=(0,)'),
    ],
)  # fmt: skip
def test_discovery_finds_the_equation(function, shapes, target, entry) -> None:
    target = f"aten.{target}"
    assert found(function, shapes, target) == f'"{target}": OpRule({entry}),'


def test_complex_results_are_compared_in_both_parts() -> None:
    # partial real parts beside a whole imaginary part: the sum over ranks has the real part alone right
    line = found(
        lambda x, y: torch.view_as_real(torch.complex(x.float(), y.float())), [(X[-1],)], "aten.complex.default"
    )
    assert "linear_in" not in line


def test_where_nothing_can_be_split_discovery_says_so() -> None:
    whole = found(lambda x, w: (x[0] * w).flip((0, 1)), [(12,)], "aten.flip.default")
    assert whole == "# aten.flip.default: only replication is possible: no split of any dim gives the same result"


def test_discovery_names_the_operators_that_the_model_calls() -> None:
    with pytest.raises(InputError, match="aten.mul.Tensor"):
        discover_rules(graph_of(*CALLS["add broadcast rows"]), ["aten.foo.default"])


def test_the_command_prints_a_file_that_the_next_command_reads(tmp_path, capsys) -> None:
    assert run(["rule", str(MODEL)]) == 0
    file = tmp_path / "found.py"
    file.write_text(capsys.readouterr().out)
    assert f'"{SOFT_CAP}": OpRule(broadcast_equation, saves=(-1,)),' in file.read_text()
    assert SOFT_CAP in load_rules([str(file)])


def test_a_rule_from_a_file_shards_the_operator(tmp_path) -> None:
    file = tmp_path / "my_rules.py"
    file.write_text(RULE_FILE)
    without, with_rule = (
        api.solve(
            api.make_problem(
                MODEL,
                hw="dgx_a100_x8",
                overrides={"width": 4096},
                options=Options(fix=(("tp", "2"), ("dp", "4"), ("pp", "1")), rules=rules, global_batch=512),
            )
        )
        for rules in ((), (str(file),))
    )
    assert without.workload.ops_without_rule == (SOFT_CAP,)
    assert with_rule.workload.ops_without_rule == ()
    assert "S" not in layouts_of(without) and layouts_of(with_rule) == {"S"}
    # the narrower activation needs no all-gather around it
    assert with_rule.result.best.estimate.step_s < without.result.best.estimate.step_s


def layouts_of(answer) -> set[str]:
    """How the operator's results lie in the chosen plan."""
    values = [pair for sharding in answer.result.best.plan.shardings for pair in sharding.values]
    return {layout[0] for name, layout in values if name.startswith("soft_cap")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RULE_FILE.replace(SOFT_CAP, "aten.linear.default"), r"matmul\.py of autoplan\.cost_models and in .*mine\.py"),
        ("RULE = {}", "no such table"),
        ("RULES = {'a.b.default': 'a b -> a b'}", r"mine\.py: RULES\['a\.b\.default'\]: found 'str'"),
        ("import nothing_of_this_name", "importing the file failed: ModuleNotFoundError"),
        (None, "no such file"),
    ],
)
def test_a_file_of_rules_that_cannot_be_used_is_an_input_error(tmp_path, text, message) -> None:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=message):
        load_rules([str(file)])


def test_an_operator_named_twice_has_one_rule_and_a_model_that_needs_none_is_told_so(capsys) -> None:
    assert api.discover_rules(MODEL, ops=[SOFT_CAP, SOFT_CAP]).count(SOFT_CAP) == 1
    assert "# every operator of the model has a rule" in api.discover_rules("examples/mlp.py")
    assert run(["rule", "examples/mlp.py", "--op", "aten.nothing.default"]) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda rules: autoplan.whatif(MODEL, hw=("dgx_a100_x8",), rules=rules),
        lambda rules: autoplan.parallelize(torch.nn.Linear(4, 4), ANY_BATCH, hw="dgx_a100_x8", rules=rules),
        lambda rules: api.discover_rules(MODEL, rules=rules),
    ],
)
def test_library_calls_refuse_a_file_of_rules_before_the_trace(call, monkeypatch) -> None:
    for module, name in ((asking, "trace_model"), (live, "trace"), (tracing, "trace_model")):
        monkeypatch.setattr(module, name, lambda *given, **options: pytest.fail("traced"))
    with pytest.raises(InputError, match="no such file"):
        call(("mine.py",))


def test_the_report_says_how_to_add_a_rule() -> None:
    from dataclasses import replace

    answer = make_answer()
    odd = replace(answer, workload=replace(answer.workload, ops_without_rule=(SOFT_CAP,)))
    assert "autoplan rule MODEL > my_rules.py" in plan_report(odd)
    assert "--rules my_rules.py" in plan_report(odd)
