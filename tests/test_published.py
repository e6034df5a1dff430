"""Validation: step times of others' runs from the data sheet alone; the error may not grow unnoticed.

`benchmarks/published.py table` prints all rows; here are some of the smallest model, on 2 A100, among them one whose
pace is set by the host (data parallel) and one that the devices hold up (pipeline, micro-batches of 8).
"""

import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import published
import published_terms

ROWS = {row["id"]: row for row in published.rows()}
PREDICT = published.Predictor()
TOLERANCE = 0.16


@pytest.mark.parametrize("name", ["vts-0982", "vts-1056", "vts-1200"])
def test_a_published_step_is_predicted_and_lies_in_its_interval(name):
    found = PREDICT(published.case_of(ROWS[name]))
    assert abs(found.error) < TOLERANCE
    assert found.is_inside
    assert found.step_s == pytest.approx(sum(found.parts_s.values()))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["dle-rn50-A100-SXM-80GB-1-fp16", "dle-rn50-V100-SXM3-32GB-1-fp16"])
def test_a_published_step_of_images_in_channels_last_is_predicted(name):
    found = PREDICT(published.case_of(ROWS[name]))
    assert found.case.mesh.memory_format == "channels_last"
    assert abs(found.error) < 0.15


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_published_steps_of_bert_on_a100_are_predicted(precision):
    found = PREDICT(published.case_of(ROWS[f"dle-bert-a100-1-s128-{precision}"]))
    assert abs(found.error) < 0.06


def test_recomputing_the_core_of_attention_takes_a_part_of_the_forward_pass():
    case = published.case_of(ROWS["vts-1200"])
    full, selective, none = (
        PREDICT(replace(case, recompute=choice)).parts_s["recompute_s"] for choice in ("full", "selective", "none")
    )
    # per sample of 1024 tokens: products of 24 x 1024 x 1024^2 and 4 x 1024^2 x 1024 FLOPs, the latter in the core,
    # which also moves 7 x 32 MiB of scores
    assert none == 0
    assert full / 7 < selective < full * 0.7


@pytest.mark.nightly
def test_eager_runs_of_llama_2_under_fsdp_are_predicted():
    found = [published_terms.llama(row) for row in published_terms.rows()]
    errors = [abs(item.estimate.step_s / item.measured_s - 1.0) for item in found]
    assert statistics.mean(errors) < 0.07 and max(errors) < 0.12
    for item in found:
        assert sum(item.terms_s().values()) == pytest.approx(item.estimate.step_s)


def test_a_row_that_says_too_little_is_refused_with_the_reason():
    assert published.reason_against(ROWS["mcore-h100-7.1B"]) == "micro-batch, recomputation and chunks not published"
    assert published.reason_against(ROWS["vts-0982"]) is None


def test_the_worst_rows_are_of_different_blocks():
    case = published.case_of(ROWS["vts-0982"])
    near, far = (published.Prediction(case, step_s, (0.0, 1.0), {}) for step_s in (1.0, 2.0))
    other = replace(far, case=replace(case, recompute="none"))
    assert published.worst([near, far, other]) == [far, other]
