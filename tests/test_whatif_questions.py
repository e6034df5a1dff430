"""Questions of what-if: a file, flags and keywords, and what is refused by its field."""

from __future__ import annotations

from pathlib import Path

import pytest
from whatif_toys import keep_points_apart, toy_answer

import autoplan
from autoplan import cli
from autoplan.errors import InputError, UsageError
from autoplan.options import Options
from autoplan.what_if import asking
from autoplan.what_if.asking import ask
from autoplan.what_if.conditions import Reliability
from autoplan.what_if.flags import Flags, flag_tables
from autoplan.what_if.money import Money, Own
from autoplan.what_if.question import parse_question, read_question
from autoplan.what_if.row_text import whatif_table

CHECKOUT = Path(__file__).parent.parent
GPT = str(CHECKOUT / "examples" / "gpt.py")
MLP = str(CHECKOUT / "examples" / "mlp.py")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_points_apart(tmp_path_factory.mktemp("points"), monkeypatch)


QUESTION = """
[workload]
model = "m.py"
set = { size = "8b" }
sweep = { seq = [1024, 2048] }
tokens = 1e12
global_batch = [256, 512]
[clusters]
hw = ["dgx_a100_x8"]
hosts = [1, 2]
network_scale = [1.0, 0.5]
[money]
rent = "reserved"
electricity = "0.12 USD/kWh"
pue = 1.2
price = { dgx_a100_x8 = "1.80 USD/h" }
[money.own]
capex = "25000 USD"
utilisation = "70 %"
[reliability]
device_mtbf = "50000 h"
spare_hosts = 2
restart = "5 min"
[loading]
storage_rate = "10 GB/s"
sample_size = "100 KB"
"""


def test_whatif_toml_is_read_and_flags_beat_it(tmp_path: Path) -> None:
    path = tmp_path / "whatif.toml"
    path.write_text(QUESTION)
    changes = flag_tables(Flags(hosts="4", given=['reliability.restart="1 min"', "money.pue=1.5"]))
    found = read_question(path, changes=changes)
    assert found.model == str(tmp_path / "m.py") and found.hosts == (4,)
    assert found.sweeps == (("seq", (1024, 2048)),) and found.n_tokens == 1e12
    (condition,) = found.conditions
    assert condition.money == Money("reserved", Own(25_000.0, utilisation=70 * 0.01), 0.12, 1.5)
    assert condition.reliability == Reliability(device_mtbf_s=1.8e8, n_spare_hosts=2, restart_s=60.0)
    assert found.given_usd == (("dgx_a100_x8", 1.8),)


def test_an_amount_that_is_given_takes_the_place_of_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "whatif.toml"
    path.write_text(QUESTION)
    found = read_question(path, changes=flag_tables(Flags(n_samples=1e6)))
    assert (found.n_tokens, found.n_samples) == (None, 1e6)


@pytest.mark.parametrize(
    "arguments", [["whatif", MLP, "--hw", "dgx_a100_x8"], ["recommend", MLP, "--budget", "9"], ["whatif", "gone.toml"]]
)
def test_two_amounts_are_refused_by_the_names_of_their_options(arguments: list[str], capsys) -> None:
    assert cli.run([*arguments, "--tokens", "1e9", "--samples", "1e6"]) == 2
    assert "--tokens and --samples: found 'both'" in capsys.readouterr().err


def test_keywords_beat_the_file_in_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "whatif.toml", []
    path.write_text(QUESTION.replace("spare_hosts = 2", "spare_hosts = [2, 3]"))

    def ask_nothing(question, **_):
        asked.append(question)
        return toy_answer()

    monkeypatch.setattr(asking, "ask", ask_nothing)
    given = {"hw": ("dgx_h100_x8",), "hosts": (3, 5), "n_tokens": 7e9, "global_batch": 96, "precision": "fp32"}
    given |= {"fix": (("tp", "2"),), "max_micro_batch_size": 4, "overrides": {"size": "big"}}
    # the file has a price of a cluster that is no longer among the hardware
    with pytest.raises(InputError, match="money.price.dgx_a100_x8"):
        autoplan.whatif(path, **given)
    path.write_text(path.read_text().replace("dgx_a100_x8 =", "dgx_h100_x8 ="))
    autoplan.whatif(path, prices_usd_per_device_hour={"dgx_h100_x8": 2.5}, asked={"scaling": "weak"}, **given)
    (found,) = asked
    assert (found.hw, found.hosts, found.n_tokens, found.scaling) == (("dgx_h100_x8",), (3, 5), 7e9, "weak")
    assert (found.global_batches, found.precisions, found.given_usd) == ((96,), ("fp32",), (("dgx_h100_x8", 2.5),))
    assert dict(found.overrides)["size"] == "big" and found.sweeps == (("seq", (1024, 2048)),)
    assert found.options == Options(fix=(("tp", "2"),), max_micro_batch_size=4)
    autoplan.whatif(path, **{**given, "overrides": {"seq": 512}})
    assert asked[-1].sweeps == () and dict(asked[-1].overrides) == {"size": "8b", "seq": 512}
    with pytest.raises(UsageError, match="asked: money: found 2 conditions"):
        autoplan.whatif(path, asked={"money": Money()}, **given)


def test_the_example_asks_of_an_example_and_of_shipped_hardware() -> None:
    found = read_question(CHECKOUT / "examples" / "whatif.toml")
    assert Path(found.model).is_file() and set(found.hw) <= set(autoplan.hardware_names())
    assert len(found.conditions) == 2


def test_lists_of_conditions_are_rows_without_another_search() -> None:
    tables = {
        "workload": {"model": GPT, "set": {"size": "char"}, "tokens": 1e9, "global_batch": 64},
        "clusters": {"hw": ["dgx_a100_x8"]},
        "reliability": {"device_mtbf": ["50000 h", "500 h"]},
        "money": {"own": {"capex": ["20000 USD", "30000 USD"]}},
    }
    answer = ask(parse_question(tables, where="w"))
    assert len(answer.sweep.results) == 1 and len({row.step_s for row in answer.rows}) == 1
    assert [row.condition for row in answer.rows] == [
        f"capex {capex}, device_mtbf {mtbf}" for capex in ("20000 USD", "30000 USD") for mtbf in ("50000 h", "500 h")
    ]
    assert answer.rows[0].train_s < answer.rows[1].train_s and "device_mtbf 500 h" in whatif_table(answer.rows)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("tokens = 1e12", "tokens = 0", "workload.tokens"),
        ("tokens = 1e12", "tokens = inf", "workload.tokens"),
        ("tokens = 1e12", "tokens = nan", "workload.tokens"),
        ("tokens = 1e12", "tokens = true", "workload.tokens"),
        ("tokens = 1e12", "tokens = 1e12\nsamples = 5", "tokens and samples"),
        ("tokens = 1e12", "toknes = 1e12", 'did you mean "tokens"'),
        ("hosts = [1, 2]", "hosts = [0]", "clusters.hosts"),
        ("hosts = [1, 2]", "hosts = [99999999999]", "clusters.hosts"),
        ("network_scale = [1.0, 0.5]", "network_scale = [0]", "clusters.network_scale"),
        ('hw = ["dgx_a100_x8"]', "hw = []", "clusters.hw"),
        ('hw = ["dgx_a100_x8"]', "", "whatif.toml: clusters.hw: found nothing"),
        ('rent = "reserved"', 'rent = "free"', "money.rent"),
        ("pue = 1.2", "pue = 0.5", "money.pue"),
        ('"1.80 USD/h"', '"0 USD/h"', "money.price.dgx_a100_x8"),
        ('"1.80 USD/h"', '"-1.80 USD/h"', "money.price.dgx_a100_x8"),
        ('"1.80 USD/h"', '"1.80 EUR/h"', "money.price.dgx_a100_x8"),
        ("dgx_a100_x8 =", "dgx_h100_x8 =", "no such name among the hardware"),
        ('utilisation = "70 %"', 'utilisation = "170 %"', "money.own.utilisation"),
        ('utilisation = "70 %"', 'utilisation = "-70 %"', "money.own.utilisation"),
        ('capex = "25000 USD"', "", "money.own.capex"),
        ('electricity = "0.12 USD/kWh"', "electricity = 0.12", "money.electricity"),
        ('restart = "5 min"', 'restart = "5"', "reliability.restart"),
        ('device_mtbf = "50000 h"', 'device_mtbf = "50000"', 'no unit; use "h" or "d"'),
        ("spare_hosts = 2", "spare_hosts = -1", "reliability.spare_hosts"),
        ("[loading]", "[loadnig]", 'did you mean "loading"'),
        (
            "[workload]",
            'modle = "x"\n[workload]',
            '[loading] alone\n  fix: write it below [workload]; did you mean "model"?',
        ),
        ("[workload]", 'spam = "x"\n[workload]', "fix: write it below one of them"),
    ],
)
def test_bad_questions_name_the_field(tmp_path: Path, capsys, old: str, new: str, field: str) -> None:
    assert old in QUESTION
    path = tmp_path / "whatif.toml"
    path.write_text(QUESTION.replace(old, new, 1))
    assert cli.run(["whatif", str(path)]) == 3
    error = capsys.readouterr().err
    assert field in error and "whatif.toml" in error and "Traceback" not in error


A100 = ("whatif", MLP, "--hw", "dgx_a100_x8")
MIXED = str(Path(MLP).parent / "a100_v100.toml")


@pytest.mark.parametrize(
    "arguments",
    [
        ["whatif"],
        ["whatif", "m.py"],
        ["whatif", "m.py", "--hw", "a", "--tokens", "0"],
        ["whatif", "m.py", "--hw", "a", "--network-scale", "x"],
        ["whatif", "m.py", "--hw", "a", "--sweep", "seq"],
        ["whatif", "m.py", "--hw", "a", "--given", "restart=5"],
        ["whatif", "m.py", "--hw", "a", "--given", "reliability.restrat=5 min"],
        ["whatif", "m.py", "--hw", "a", "--hosts", ",".join(map(str, range(1, 12_000)))],
        ["whatif", "m.py", "--hw", "a", "--price", "b=2"],
        [*A100, "--set", "width=8", "--sweep", "width=8,16"],
        [*A100, "--set", "width=8", "--set", "width=16"],
        [*A100, "--price", "dgx_a100_x8=1", "--price", "dgx_a100_x8=2"],
        [*A100, "--rent", "spot", "--given", "money.rent=reserved"],
        ["recommend", MLP, "--deadline", "14d"],
        ["recommend", MLP, "--samples", "1e6", "--deadline", "14d", "--budget", "5"],
        ["recommend", MLP, "--samples", "1e6", "--deadline", "14"],
        ["recommend", MLP, "--samples", "1e6", "--budget", "0"],
        ["recommend", MLP, "--samples", "1e6", "--budget", "9", "--among", "rtx4090_x8"],  # no price
        ["recommend", MLP, "--samples", "1e6", "--budget", "9", "--among", MIXED],
        ["advise", MLP],
        ["advise", MLP, "--hw", "dgx_a100_x8,dgx_h100_x8"],
        ["advise", MLP, "--hw", "dgx_a100_x8", "--global-batch", "8,16"],
        ["recommend", MLP, "--samples", "1e6", "--budget", "9", "--precision", "bf16,fp32"],
        ["hw", "prices", "x.csv", "--date", "tomorrow"],
    ],
)
def test_wrong_purchase_command_lines_exit_2(arguments: list[str]) -> None:
    assert cli.run(arguments) == 2


def test_mlp_reads_no_tokens() -> None:
    with pytest.raises(UsageError, match="use --samples"):
        autoplan.whatif(MLP, hw=("dgx_a100_x8",), n_tokens=1e9)


@pytest.mark.parametrize(
    "arguments",
    [
        ["whatif", "gone.py", "--hw", "dgx_a100_x8"],
        ["advise", "gone.py", "--hw", "dgx_a100_x8"],
        ["recommend", "gone.py", "--budget", "1000", "--samples", "1e6"],
    ],
)
def test_a_wrong_fix_is_refused_before_the_model_is_traced(arguments: list[str], capsys) -> None:
    assert cli.run([*arguments, "--fix", "microbatch=2"]) == 2  # there is no such model, which a trace would find
    assert 'did you mean "micro_batch"' in capsys.readouterr().err
