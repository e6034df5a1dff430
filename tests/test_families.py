"""Every family of models against one process: two AdamW steps in float64, clipped, under several kinds of plans.

`benchmarks/families.py` runs all features of all families; here are those that differ most.
"""

import pytest
from distributed.families import FAMILIES, family_plan, n_ranks, sharded_fraction, tolerance
from distributed.launch import run_ranks
from distributed.lint import assert_formatted_and_free_of_lint
from distributed.programs import check_programs, write_programs

MODELS = [model for model in FAMILIES.values() if model not in ("gpt", "llama", "mlp")]  # these: test_equivalence.py
SHARDED_LESS = {"lstm": 0.15, "custom_op": 0.8, "vit_hf": 0.9, "resnet": 0.9}  # what one process must hold whole


def assert_exact(folder, model, features, *, seed=None):
    plans = {feature: family_plan(model, feature, seed=seed) for feature in features}
    names = {f"case{number}": feature for number, feature in enumerate(plans)}
    rows = write_programs(folder, {name: (model, plans[feature]) for name, feature in names.items()})
    for differences in run_ranks(check_programs, n_ranks(features[0]), str(folder), rows, timeout_s=200.0):
        for name, steps in differences.items():
            assert max(max(step) for step in steps) <= tolerance(model), (names[name], steps)
    return plans


LIKE_OTHERS = ("mistral_hf", "qwen_hf", "bert_hf", "mixtral_hf", "conformer", "fourier", "two_tower")  # tested at night


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.nightly) if name in LIKE_OTHERS else name for name in MODELS]
)
def test_family_equals_one_process_on_two_ranks_and_its_programs_are_formatted_and_free_of_lint(model, tmp_path):
    plans = assert_exact(tmp_path, model, ("recompute", "TP 2", "PP 2"))
    generated = list(tmp_path.glob("parallel_*.py"))
    assert len(generated) == 2
    assert_formatted_and_free_of_lint(*generated)
    assert sharded_fraction(model, plans["TP 2"]) >= SHARDED_LESS.get(model, 0.9)


@pytest.mark.parametrize(
    "model", [*(pytest.param(name, marks=pytest.mark.nightly) for name in ("t5_hf", "resnet", "unet")), "mixture"]
)
def test_family_equals_one_process_under_everything_at_once(model, tmp_path):
    assert_exact(tmp_path, model, ("PP 2 x TP 2 x ZeRO 3 x recompute",))


@pytest.mark.nightly
@pytest.mark.parametrize("model", FAMILIES.values())
def test_compiled_blocks_of_a_family_equal_one_process(model, tmp_path):
    assert_exact(tmp_path, model, ("compiled, TP 2",))


@pytest.mark.nightly
@pytest.mark.parametrize("model", FAMILIES.values())
def test_compiled_blocks_of_a_family_under_data_parallelism_equal_one_process(model, tmp_path):
    assert_exact(tmp_path, model, ("compiled, DP 2",))


# One of each structure; the layers of the others are those of these, or of the two models in test_equivalence.py.
ANY_ASSIGNMENT = ("mixture", "unet", "state_space", "two_tower", "shared_layers")


@pytest.mark.parametrize(
    "model", [name if name in ANY_ASSIGNMENT else pytest.param(name, marks=pytest.mark.nightly) for name in MODELS]
)
def test_whatever_assignment_the_solver_may_pick_equals_one_process(model, tmp_path):
    assert_exact(tmp_path, model, ("TP 2",), seed=MODELS.index(model))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 116))
@pytest.mark.parametrize("model", FAMILIES.values())
def test_many_assignments_equal_one_process(model, seed, tmp_path):
    assert_exact(tmp_path, model, (("TP 2", "TP 4")[seed % 2],), seed=seed)
