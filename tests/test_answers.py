"""Answers: their figures, and what of them JSON and CSV keep."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace

import pytest

from autoplan.answers import answer as answers
from autoplan.answers.answer import (
    Answer,
    Request,
    answer_from_json,
    answer_to_dict,
    answer_to_json,
    device_hours,
    mfu,
    samples_per_s,
    tokens_per_s,
)
from autoplan.errors import InputError
from autoplan.options import Options
from autoplan.output.folder import rejected_csv
from autoplan.parallel_plan import Mesh
from autoplan.report.plan import rejections_text
from autoplan.search.result import Rejection


def test_mfu_is_model_flops_over_time_and_peak_of_the_used_devices(answer: Answer) -> None:
    # global batch 2 x 1 x 4 = 8 samples of 1 TFLOP in 1.6 s on 4 devices of 10 TFLOP/s: 8 / (1.6 x 40) = 0.125
    assert mfu(answer.workload, answer.best) == pytest.approx(0.125)


def test_throughput_is_batch_over_step_time(answer: Answer) -> None:
    # 8 samples / 1.6 s = 5 samples/s; 100 tokens each
    assert samples_per_s(answer.best) == pytest.approx(5.0)
    assert tokens_per_s(answer.workload, answer.best) == pytest.approx(500.0)


def test_device_hours_count_every_device_of_the_cluster(answer: Answer) -> None:
    # 18000 samples / (5 samples/s) = 3600 s = 1 h on 4 devices
    assert device_hours(answer.workload, answer.best, n_samples=18_000) == pytest.approx(4.0)


def test_answer_survives_json_unchanged(answer: Answer, infeasible: Answer) -> None:
    assert answer_from_json(answer_to_json(answer)) == answer
    assert answer_from_json(answer_to_json(infeasible)) == infeasible
    options = Options(fix=(("tp", "2"),), time_limit_s=None, rules=("my_rules.py",))
    asked = replace(answer, request=Request("toy.py", ("width=8",), "toy_x4", 2, options))
    assert answer_from_json(answer_to_json(asked)) == asked


def test_a_plan_of_before_a_field_existed_has_its_default(answer: Answer) -> None:
    content = json.loads(answer_to_json(answer))
    best = content["best"]
    assert best["plan"].pop("loss") == "whole" and best["estimate"]["breakdown"].pop("exposed_batch_copy_s") == 0.0
    assert answer_from_json(json.dumps(content)) == answer
    del best["plan"]["stages"]
    with pytest.raises(InputError, match="missing or unknown: stages"):
        answer_from_json(json.dumps(content))


def test_json_has_every_field_of_the_contract(answer: Answer) -> None:
    found = answer_to_dict(answer)
    assert found["schema_version"] == 1
    assert (found["status"], found["gap"]) == ("optimal", 0.0)
    assert {"dp", "tp", "pp", "zero_stage", "zero_shard_degree", "micro_batch_size", "n_micro_batches"} <= set(
        found["plan"]
    )
    assert {"schedule", "recompute", "compile", "stages"} <= set(found["plan"])
    # the estimate in the middle, as far from either end
    low_s, high_s = found["step_s_interval"]
    assert low_s < 1.6 < high_s and low_s * high_s == pytest.approx(1.6**2)
    (low, high), (other_low, other_high) = found["allocated_bytes_interval_per_stage"]
    assert low < 4 * 2**30 < high and other_low < 7 * 2**30 < other_high
    assert found["tokens_or_samples_per_s"] == pytest.approx(500.0)
    assert found["peak_bytes_per_stage"] == [5 * 2**30, 8 * 2**30]
    assert found["memory_limit_bytes"] == 10 * 2**30
    assert found["provenance"] == {"peak": "toy data sheet"}
    assert [item["reason"] for item in found["rejected"]] == ["memory", "slower"]
    assert found["search_s"] == 0.5


def test_breakdown_in_json_sums_to_the_step_time(answer: Answer) -> None:
    parts = answer_to_dict(answer)["breakdown_s"]
    communication = parts.pop("exposed_comm")
    assert sum(parts.values()) + sum(communication.values()) == pytest.approx(1.6)


def test_json_of_an_infeasible_answer_has_no_invented_numbers(infeasible: Answer) -> None:
    found = answer_to_dict(infeasible)
    assert found["status"] == "infeasible"
    assert found["plan"] is None and found["step_s"] is None and found["gap"] is None


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda text: text[: len(text) // 2], "plan.json"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 99'), "schema_version"),
        (lambda text: text.replace('"n_devices": 4', '"n_devices": "4"'), "workload.n_devices"),
        (lambda text: text.replace('"n_devices": 4', '"n_devics": 4'), "n_devics"),
        (lambda text: text.replace('"search_s": 0.5', '"search_s": NaN'), "NaN"),
        (lambda text: "[" * 100_000, "plan.json"),
        (lambda text: "[]", "plan.json"),
    ],
)
def test_damaged_plan_json_is_an_input_error_naming_the_place(answer: Answer, damage, named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        answer_from_json(damage(answer_to_json(answer)))


def test_json_keeps_the_nearest_of_very_many_rejections_and_counts_all(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 100
    monkeypatch.setattr(answers, "MAX_REJECTED", most)
    far = tuple(Rejection(Mesh(dp=dp), "bound", "no plan of it is faster") for dp in range(most))
    near = answer.result.rejected  # one lacks memory, one is slower
    text = answer_to_json(replace(answer, result=replace(answer.result, rejected=(*far, *near))))
    again = answer_from_json(text)
    kept = again.result.rejected
    assert kept == (*far[: most - 2], *near)
    assert again.result.rejected_by_reason == {"bound": most, "memory": 1, "slower": 1}
    assert f"of {most + 2} combinations" in rejections_text(again.result)
    assert answer_from_json(answer_to_json(again)) == again


def test_rejected_csv_reads_back_row_by_row(answer: Answer) -> None:
    rows = list(csv.DictReader(io.StringIO(rejected_csv(answer.result.rejected))))
    assert [(row["reason"], row["dp"], row["step_s"]) for row in rows] == [("memory", "4", ""), ("slower", "2", "2.0")]
