"""Options: what is refused, on the command line and in the library alike, and what is said then."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autoplan import api, cli, errors, options
from autoplan.checks.options import check_options, fix_pairs, options_of, parse_fix, parse_overrides
from autoplan.options import Options
from autoplan.runtime import config
from autoplan.search import meshes

PLAN = ["plan", "toy.py", "--hw", "toy_x4"]
GPT = Path(__file__).parent.parent / "examples" / "gpt.py"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "toy.py"],
        ["plan", "toy.py", "--hw", "a", "--hosts", "0"],
        ["plan", "toy.py", "--hw", "a", "--precision", "fp8"],
        ["plan", "toy.py", "--hw", "a", "--memory-confidence", "49"],
        ["whatif", "toy.py", "--hw", "a", "--memory-confidence", "100"],
        ["plna"],
        ["estimate", "toy.py", "--hw", "a"],
        ["whatif", "toy.py", "--hw", "a", "--hosts", "1,x"],
        ["whatif", "toy.py", "--hw", "a", "--price", "a=0"],
        ["whatif", "toy.py", "--hw", "a", "--tokens", "-5"],
        ["profile", "toy.py", "--hw", "a"],
        ["recommend", "toy.py"],
        ["hw", "measure"],  # without --out
    ],
)
def test_wrong_command_lines_exit_2(arguments: list[str]) -> None:
    assert cli.run(arguments) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("recommend toy.py --tokens -5 --budget 9", "--tokens: found -5.0\n  expected: a number, 1 to 1e+20\n  fix: "),
        ("whatif toy.py --hw a --samples 0", "--samples: found 0.0\n  expected: "),
        ("whatif toy.py --hw a --global-batch 0", "--global-batch: found 0\n  expected: "),
        ("whatif toy.py --hw a --hosts 1,x", "--hosts: found '1,x'\n  expected: counts separated by commas\n  fix: "),
        ("whatif toy.py --hw , --hosts 1", "--hw: found nothing\n  expected: names separated by commas\n  fix: "),
        ("plan toy.py", "Missing option '--hw'. `autoplan hw list`"),
        ("whatif nothere.toml", "nothere.toml: no such file\n  expected: a file of questions"),
    ],
)
def test_an_option_is_named_as_it_was_typed_with_what_is_expected(arguments: str, said: str, capsys) -> None:
    assert cli.run(arguments.split()) in (2, 3)
    assert said in capsys.readouterr().err


MISSING = [
    "plan no.py --hw dgx_a100_x8",
    "estimate no.py --hw dgx_a100_x8 --fix dp=8",
    "whatif no.py --hw dgx_a100_x8",
    "advise no.py --hw dgx_a100_x8",
    "recommend no.py --among dgx_a100_x8 --tokens 1e9 --budget 9",
    "profile no.py --hw dgx_a100_x8 --emit out",
    "rule no.py",
    "plan hf:no.json --hw dgx_a100_x8",
    "plan toy.py --hw no.toml",
    "whatif no.toml",
    "hw validate no.toml",
    "explain no",
    "verify no",
    "plan folder --hw dgx_a100_x8",
    "plan toy.py --hw folder.toml",
]
# Each with what it says, where it ends, and whether torch has been imported until then.
RUN_ALL = """
import contextlib, io, json, sys
from autoplan import cli

for command in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        code = cli.run(command.split())
    print(json.dumps([code, "torch" in sys.modules, out.getvalue(), error.getvalue()]))
"""


def test_a_file_that_is_not_there_is_told_alike_everywhere_and_before_torch_is_imported(tmp_path: Path) -> None:
    for name in ("folder", "folder.toml"):
        (tmp_path / name).mkdir()
    arguments = [sys.executable, "-c", RUN_ALL, *MISSING]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = r"(hf:)?no(\.\w+)?: no such file|folder(\.toml)?: a folder, not a file"
    for command, line in zip(MISSING, done.stdout.splitlines(), strict=True):
        *ends, error = json.loads(line)
        assert ends == [3, False, ""], (command, error)
        assert re.search(rf"^autoplan: ({found})\n  expected: .*\n  fix: ", error, re.MULTILINE), command


def test_measurements_that_are_missing_are_told_what_writes_them(capsys) -> None:
    mlp = str(Path(__file__).parent.parent / "examples" / "mlp.py")
    assert cli.run(["plan", mlp, "--hw", "dgx_a100_x8", "--profile", "no.json"]) == 3
    assert "no.json: no such file\n  expected: what autoplan profile MODEL " in capsys.readouterr().err


def test_misspelt_fix_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(errors.UsageError, match='did you mean "micro_batch"(.|\\n)*expected: .*\n  fix: '):
        check_options(Options(fix=parse_fix(["microbatch=2"])))
    with pytest.raises(errors.UsageError, match='did you mean "1f1b"'):
        check_options(Options(fix=parse_fix(["schedule=1f1"])), schedules=("1f1b", "gpipe"))


def test_a_name_with_its_value_joined_is_answered_with_both() -> None:
    for text in ("zero2", "zero_2"):
        with pytest.raises(errors.UsageError, match="fix: write --fix zero=2$"):
            parse_fix([text])
    with pytest.raises(errors.UsageError, match="fix: write --fix stage2=VALUE$"):
        parse_fix(["stage2"])


@pytest.mark.parametrize("fix", ["dp=0", "dp=-1", "dp=two", "dp=2.5", "zero=4", "recompute=some", "compile=yes"])
def test_impossible_fix_values_are_refused(fix: str) -> None:
    with pytest.raises(errors.UsageError, match=fix.partition("=")[0] + r": found .*\n  expected: .*\n  fix: "):
        check_options(Options(fix=parse_fix([fix])))


@pytest.mark.parametrize("fix", ["dp", "=2", "dp=", "dp=1,dp=2"])
def test_malformed_fix_texts_are_refused(fix: str) -> None:
    with pytest.raises(errors.UsageError, match="found .*\n  expected: .*\n  fix: "):
        parse_fix([fix])


@pytest.mark.parametrize(
    "options",
    [Options(precision="fp8"), Options(objective="speed"), Options(global_batch=0), Options(time_limit_s=float("nan"))],
)
def test_library_options_are_checked_like_the_command_line(options: Options) -> None:
    with pytest.raises(errors.UsageError):
        check_options(options)


def test_stages_per_rank_may_be_called_chunks() -> None:
    pairs = (("stages_per_rank", "2"),)
    assert parse_fix(["chunks=2"]) == check_options(Options(fix=(("chunks", "2"),))).fix == pairs
    with pytest.raises(errors.UsageError, match="found twice"):
        parse_fix(["chunks=2,stages_per_rank=2"])
    with pytest.raises(errors.UsageError, match=r"fix stages_per_rank: found twice \(2 and 4\)"):
        fix_pairs({"chunks": 2, "stages_per_rank": 4})


@pytest.mark.parametrize("fix", [{1: 2}, ((1, 2),), 5, ("tp=2",)])
def test_what_the_library_cannot_read_as_fix_is_refused(fix: object) -> None:
    with pytest.raises(errors.UsageError, match=r"^fix: found "):
        fix_pairs(fix)


def test_pairs_of_an_iterator_are_all_read() -> None:
    assert fix_pairs(iter([("tp", 2), ("pp", "1")])) == (("tp", "2"), ("pp", "1"))


def test_set_values_are_python_literals_or_strings() -> None:
    found = parse_overrides(["a=3", "b=1e-3", "c=[1, 2]", "d=True", "e=70b", "f=__import__('os')"])
    assert found == {"a": 3, "b": 1e-3, "c": [1, 2], "d": True, "e": "70b", "f": "__import__('os')"}


@pytest.mark.parametrize("fix", [3, ["tp=2"], (("tp",),)])
def test_a_fix_of_the_library_that_is_none_is_refused_with_an_example_of_each_way(fix) -> None:
    with pytest.raises(errors.UsageError, match=r'the text of --fix, a dict, or pairs(.|\n)*fix="tp=2,pp=1"'):
        options_of({"fix": fix})


@pytest.mark.parametrize("fix", ["schedule=1f1b,stages_per_rank=2", "schedule=zero_bubble_v,chunks=1", "pp=1,chunks=2"])
def test_a_number_of_stages_that_a_schedule_never_has_is_refused(fix: str) -> None:
    with pytest.raises(errors.UsageError, match=r"fix stages_per_rank: found (.|\n)*fix: leave one of"):
        check_options(Options(fix=parse_fix([fix])))
    for others in ("schedule=interleaved,stages_per_rank=3", "schedule=gpipe,chunks=1", "pp=1,chunks=1"):
        check_options(Options(fix=parse_fix([others])))


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble_v"])
def test_a_schedule_of_several_stages_per_rank_needs_several_ranks(schedule: str) -> None:
    with pytest.raises(errors.UsageError, match=rf"fix schedule={schedule}: found 'pp=1'(.|\n)*fix: leave one of"):
        check_options(Options(fix=parse_fix([f"pp=1,schedule={schedule}"])))
    for others in (f"pp=2,schedule={schedule}", f"schedule={schedule}", "pp=1,schedule=1f1b"):
        check_options(Options(fix=parse_fix([others])))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"global_batch": "64"}, "--global-batch: found '64'"),
        ({"hosts": "2"}, "--hosts: found '2'"),
        ({"hw": ["dgx_a100_x8"]}, r"hw: found \['dgx_a100_x8'\](.|\n)*expected: a text"),
        ({"precison": "fp32"}, "unknown name 'precison'; did you mean \"precision\""),
        ({"fix": {"dp": "x"}}, "--fix dp: found 'x'"),
    ],
)
def test_a_library_call_with_a_wrong_name_or_type_is_told_what_is_expected(given, message) -> None:
    with pytest.raises(errors.UsageError, match=message):
        api.plan(GPT, **{"hw": "dgx_a100_x8/2", "global_batch": 8, **given})


@pytest.mark.parametrize("ask", [api.plan, api.whatif])
def test_a_model_itself_is_refused_where_a_file_is_named(ask) -> None:
    with pytest.raises(errors.InputError, match=r"model: found 'NoPath'(.|\n)*build_model(.|\n)*autoplan\.parallelize"):
        ask(type("NoPath", (), {})(), hw="dgx_a100_x8/2" if ask is api.plan else ["dgx_a100_x8/2"])


@pytest.mark.parametrize(
    "fix",
    [
        "dp=2,schedule=gpipe",
        {"dp": 2, "schedule": "gpipe"},
        [("dp", 2), ("schedule", "gpipe")],
        (("dp", "2"), ("schedule", "gpipe")),
    ],
)
def test_fix_of_the_library_may_be_a_text_a_dict_or_pairs(fix) -> None:
    pairs = (("dp", "2"), ("schedule", "gpipe"))
    assert options_of({"fix": fix}) == check_options(Options(fix=fix)) == Options(fix=pairs)
    (row,) = api.whatif(GPT, hw=["dgx_a100_x8/2"], n_tokens=1e6, global_batch=8, fix=fix)
    assert row.fix is not None and row.fix.startswith("dp=2,")


def test_several_settings_after_one_set_are_refused_and_a_quoted_text_is_one() -> None:
    with pytest.raises(errors.UsageError, match="--set d=64 --set depth=2"):
        parse_overrides(["d=64,depth=2"])
    assert parse_overrides(["name='a,b=c'", "sizes=[1, 2]", "words=a,b"]) == {
        "name": "a,b=c",
        "sizes": [1, 2],
        "words": "a,b",
    }


def test_a_model_without_a_trained_parameter_is_refused(tmp_path) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "def build_model(**_): return nn.ReLU()\n"
        "def make_batch(n): return torch.randn(n, 4), torch.randn(n, 4)\n"
        "def loss_fn(y, target): return (y - target).mean()\n"
    )
    with pytest.raises(errors.InputError, match="no parameter that is trained"):
        api.plan(file, hw="dgx_a100_x8/2", global_batch=4)


@pytest.mark.parametrize("name", ["BATCH_NORMS", "MEMORY_FORMATS", "GRAD_COMPRESSIONS"])
def test_programs_which_have_no_planner_know_the_same_choices(name):
    assert getattr(options, name) == getattr(config, name)


def test_and_the_same_zero_stages_of_split_backward_passes():
    assert meshes.MAX_SPLIT_ZERO_STAGE == config.MAX_SPLIT_ZERO_STAGE
