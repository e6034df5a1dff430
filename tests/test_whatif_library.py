"""What-if as a library call: what is given by keyword, and who searches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import autoplan
from autoplan import user_cache
from autoplan.errors import InputError, UsageError
from autoplan.options import Options
from autoplan.what_if.question import Question, checked_question

MLP = str(Path(__file__).parent.parent / "examples" / "mlp.py")
QUESTION = Question(MLP, ("dgx_a100_x8",))


def test_a_precision_that_is_given_is_not_taken_for_the_default() -> None:
    assert checked_question(QUESTION, where="test").precisions == ("bf16",)
    clash = replace(QUESTION, precisions=("bf16",), options=Options(precision="fp32"))
    with pytest.raises(InputError, match="workload.precision"):
        checked_question(clash, where="test")
    with pytest.raises(UsageError, match="precision"):
        autoplan.whatif(MLP, hw=("dgx_a100_x8",), precision="bf16", asked={"precisions": ("fp32",)})


def test_any_executor_finds_the_same_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = []
    with ThreadPoolExecutor(2) as pool:
        for number, executor in enumerate((None, pool)):
            folder = str(tmp_path / str(number))  # nothing is kept from the other one
            monkeypatch.setattr(user_cache, "user_cache_dir", lambda name, folder=folder: folder)
            asked = {"time_limit_s": 60.0}  # the searches end by themselves, however busy the machine is
            question = {"hw": ("dgx_a100_x8",), "hosts": (1, 2), "global_batch": 64, "asked": asked}
            found.append(autoplan.whatif(MLP, **question, executor=executor))
    assert found[0] == found[1] and {row.n_hosts for row in found[1] if row.step_s} == {1, 2}


@pytest.mark.parametrize(("given", "field"), [({"hosts": (0,)}, "clusters.hosts"), ({"hw": ()}, "clusters.hw")])
def test_keywords_are_refused_as_the_values_of_a_file_are(given: dict[str, object], field: str) -> None:
    with pytest.raises(InputError, match=field):
        autoplan.whatif(MLP, **{"hw": ("dgx_a100_x8",), **given})
