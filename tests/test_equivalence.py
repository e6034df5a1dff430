"""Generated programs against one process: loss, gradients and parameters, fp64, two AdamW steps, clipped."""

from collections import defaultdict

import pytest
from distributed.launch import run_ranks
from distributed.programs import N_STEPS, check_programs, graph_of, make_plan, shardings_of, write_programs

from autoplan.cost.boundaries import legal_cuts

TOLERANCE = 1e-9


def assert_equal_to_one_process(tmp_path, cases, *, n_ranks, tolerance=TOLERANCE):
    rows = write_programs(tmp_path, cases)
    for differences in run_ranks(check_programs, n_ranks, str(tmp_path), rows, N_STEPS, timeout_s=400.0):
        assert set(differences) == set(cases)
        for name, steps in differences.items():
            assert len(steps) == N_STEPS, name
            assert max(max(step) for step in steps) <= tolerance, (name, steps)


BOUNDARIES = {"R": "whole", "S(1)": "sequence"}
# What depends on the code generated for a model; the rest of the cases wraps the classes of its file, whichever it is.
LLAMA_TOO = (
    "tp2_attention", "zero3_generated", "pp2_interleaved", "tp2_whole", "tp2_sequence", "tp4_sequence", "tp2_pp2",
)  # fmt: skip
# What test_runtime_parallel.py runs too, as wrapped by the runtime, or what other cases here are parts of.
PARTS = (
    "zero1", "zero1_generated", "zero3_recompute", "pp2_attention", "pp2_gpipe_recompute",
    "pp4", "tp4_sequence", "tp2_zero3",
)  # fmt: skip


WHICH = pytest.mark.parametrize("which", ["by default", pytest.param("others", marks=pytest.mark.nightly)])


def chosen(cases, which):
    """The cases of gpt that are not in `PARTS` and those of llama in `LLAMA_TOO`, or the others."""
    others = {name for name in cases if name.startswith("llama_") and name.removeprefix("llama_") not in LLAMA_TOO}
    others |= {f"gpt_{name}" for name in PARTS} & set(cases)
    return {name: case for name, case in cases.items() if (name in others) == (which == "others")}


def two_rank_cases(model):
    cases = {
        "ddp": make_plan(model, dp=2, micro_batch_size=2, n_micro_batches=2),
        "zero1": make_plan(model, dp=2, zero_stage=1, zero_shard_degree=2, n_micro_batches=2),
        "zero2": make_plan(model, dp=2, zero_stage=2, zero_shard_degree=2, n_micro_batches=2),
        "zero3": make_plan(model, dp=2, zero_stage=3, zero_shard_degree=2, n_micro_batches=2),
        "zero3_recompute": make_plan(model, dp=2, zero_stage=3, zero_shard_degree=2, recompute="full"),
        "zero1_generated": make_plan(model, dp=2, zero_stage=1, zero_shard_degree=2, generated=True),
        "zero3_generated": make_plan(
            model, dp=2, zero_stage=3, zero_shard_degree=2, n_micro_batches=2, recompute="full", generated=True
        ),
        "pp2": make_plan(model, pp=2, micro_batch_size=2, n_micro_batches=4),
        "pp2_gpipe_recompute": make_plan(model, pp=2, n_micro_batches=2, schedule="gpipe", recompute="half"),
        "pp2_interleaved": make_plan(model, pp=2, n_micro_batches=4, schedule="interleaved", n_chunks=2),
        "pp2_ahead": make_plan(model, pp=2, n_micro_batches=4, schedule="interleaved", recompute="half"),
        "tp2_recompute": make_plan(model, tp=2, sharding="R", n_micro_batches=2, recompute="full"),
        "zero3_attention": make_plan(
            model, dp=2, zero_stage=3, zero_shard_degree=2, n_micro_batches=2, recompute="full", keeps_attention=True
        ),
        "pp2_attention": make_plan(model, pp=2, n_micro_batches=2, recompute="half", keeps_attention=True),
        "tp2_attention": make_plan(model, tp=2, sharding="S(1)", recompute="full", keeps_attention=True),
        "attention_compiled": make_plan(model, dp=2, recompute="full", keeps_attention=True, compile=True),
    }
    for boundary, name in BOUNDARIES.items():
        cases[f"tp2_{name}"] = make_plan(model, tp=2, sharding=boundary, micro_batch_size=3)
    return {f"{model}_{name}": (model, plan) for name, plan in cases.items()}


ZERO_BUBBLE_V = {"schedule": "zero_bubble_v", "n_chunks": 2}


def zero_bubble_cases(model):
    """On four ranks: data parallel under each ZeRO stage that goes with a split backward pass, tensor parallel."""
    cases = {
        f"zero{stage}": make_plan(
            model, pp=2, dp=2, n_micro_batches=4, zero_stage=stage, zero_shard_degree=2 if stage else 1, **ZERO_BUBBLE_V
        )
        for stage in (0, 1, 2)
    }
    for boundary, name in BOUNDARIES.items():
        cases[f"tp2_{name}"] = make_plan(model, pp=2, tp=2, sharding=boundary, n_micro_batches=3, **ZERO_BUBBLE_V)
    return {f"{model}_zero_bubble_{name}": (model, plan) for name, plan in cases.items()}


def four_rank_cases(model):
    cases = {
        "hsdp": make_plan(model, dp=4, zero_stage=3, zero_shard_degree=2),
        "pp4": make_plan(model, pp=4, n_micro_batches=4),
        "pp2_interleaved_dp2": make_plan(
            model, pp=2, dp=2, n_micro_batches=2, schedule="interleaved", n_chunks=2, zero_stage=2, zero_shard_degree=2
        ),
        "tp4": make_plan(model, tp=4, sharding="R", micro_batch_size=2),
        "tp4_sequence": make_plan(model, tp=4, sharding="S(1)"),
        "tp2_zero3": make_plan(model, tp=2, dp=2, sharding="S(1)", zero_stage=3, zero_shard_degree=2),
        "tp2_pp2": make_plan(model, tp=2, pp=2, sharding="R", n_micro_batches=2),
    }
    return {f"{model}_{name}": (model, plan) for name, plan in cases.items()}


@WHICH
def test_programs_on_two_ranks_equal_one_process(tmp_path, which):
    cases = {**two_rank_cases("gpt"), **two_rank_cases("llama")}
    cases["mlp_tp2"] = ("mlp", make_plan("mlp", tp=2, sharding="R", micro_batch_size=4))
    cases["mlp_pp2"] = ("mlp", make_plan("mlp", pp=2, n_micro_batches=4))
    for name, mesh in {"pp2": {"pp": 2, "n_micro_batches": 2}, "tp2": {"tp": 2, "sharding": "R"}}.items():
        cases[f"own_loss_{name}"] = ("own_loss", make_plan("own_loss", micro_batch_size=2, **mesh))
    assert_equal_to_one_process(tmp_path, chosen(cases, which), n_ranks=2)


@pytest.mark.nightly
def test_a_batch_norm_that_is_called_twice_equals_one_process(tmp_path):
    graph, uses = graph_of("siamese"), defaultdict(list)
    for number, segment in enumerate(graph.segments):
        for name in segment.parameters:
            uses[name].append(number)
    first, last = uses["projector.1.running_mean"][0], uses["projector.1.running_mean"][-1]
    assert first < last and not any(legal_cuts(graph)[first:last]) and any(legal_cuts(graph)[:first])
    cases = {
        "tp2": {"tp": 2, "sharding": "R", "micro_batch_size": 4},
        "zero3": {"dp": 2, "zero_stage": 3, "zero_shard_degree": 2, "micro_batch_size": 4},
    }
    plans = {name: ("siamese", make_plan("siamese", **mesh)) for name, mesh in cases.items()}
    assert_equal_to_one_process(tmp_path, plans, n_ranks=2)


@WHICH
def test_models_with_dropout_equal_one_process_where_both_leave_it_out(tmp_path, which):
    model, plans = (
        "gpt_dropout",
        {
            "zero3_recompute": {"dp": 2, "zero_stage": 3, "zero_shard_degree": 2, "recompute": "full"},
            "tp2_recompute": {"tp": 2, "sharding": "S(1)", "recompute": "full"},
            "compiled": {"dp": 2, "compile": True},
        },
    )
    names = [name for name in plans if (name == "compiled") == (which == "others")]
    cases = {name: (model, make_plan(model, **plans[name])) for name in names}
    assert_equal_to_one_process(tmp_path, cases, n_ranks=2)


def test_blocks_that_are_sequentials_equal_one_process(tmp_path):
    graph = graph_of("numbered")
    kinds = {segment.name: segment.kind for segment in graph.segments}
    assert kinds["down.0"] != kinds["up.0"]  # the same ops and results, of 8 and of 48 features
    plan = make_plan("numbered", pp=2, micro_batch_size=2, n_micro_batches=2)
    assert_equal_to_one_process(tmp_path, {"pp2": ("numbered", plan)}, n_ranks=2)


def test_a_cast_that_is_nothing_in_bfloat16_is_made_up_for_in_float64(tmp_path):
    meshes = {"tp": {"tp": 2, "sharding": "R"}, "pp": {"pp": 2, "n_micro_batches": 2}}
    cases = {name: ("mixed_dtypes", make_plan("mixed_dtypes", **mesh)) for name, mesh in meshes.items()}
    assert_equal_to_one_process(tmp_path, cases, n_ranks=2, tolerance=1e-5)


def test_odd_names_labels_as_many_as_samples_lent_weights_and_two_ways_to_run_equal_one_process(tmp_path):
    meshes = {"tp2": {"tp": 2, "sharding": "R"}, "pp2": {"pp": 2}}
    cases = {
        f"{model}_{name}": (model, make_plan(model, micro_batch_size=2, n_micro_batches=2, **mesh))
        for model in ("odd_names", "in_batch", "lent", "two_ways")
        for name, mesh in meshes.items()
    }
    assert_equal_to_one_process(tmp_path, cases, n_ranks=2)


def test_a_split_backward_pass_on_two_ranks_equals_one_process(tmp_path):
    cases = {
        f"{model}_{n_micro_batches}": (model, make_plan(model, pp=2, n_micro_batches=n_micro_batches, **ZERO_BUBBLE_V))
        for model in ("gpt", "llama", "mlp", "own_loss")
        for n_micro_batches in (2, 5)
    }
    assert_equal_to_one_process(tmp_path, cases, n_ranks=2)


@pytest.mark.nightly
def test_a_split_backward_pass_on_four_ranks_equals_one_process(tmp_path):
    cases = {**zero_bubble_cases("gpt"), **zero_bubble_cases("llama")}
    cases["llama_deep_pp4"] = ("llama_deep", make_plan("llama_deep", pp=4, n_micro_batches=8, **ZERO_BUBBLE_V))
    assert_equal_to_one_process(tmp_path, cases, n_ranks=4)


@pytest.mark.nightly
@WHICH
def test_programs_on_four_ranks_equal_one_process(tmp_path, which):
    cases = {**four_rank_cases("gpt"), **four_rank_cases("llama")}
    for model in ("gpt_deep", "llama_deep"):
        for n_chunks in (1, 2):
            plan = make_plan(model, pp=4, n_micro_batches=8, schedule="interleaved", n_chunks=n_chunks)
            cases[f"{model}_pp4_interleaved_{n_chunks}"] = (model, plan)
    assert_equal_to_one_process(tmp_path, chosen(cases, which), n_ranks=4)


@WHICH
def test_pipeline_tensor_zero_and_recompute_together_on_eight_ranks_equal_one_process(tmp_path, which):
    mesh = {"pp": 2, "tp": 2, "dp": 2, "zero_stage": 3, "zero_shard_degree": 2, "n_micro_batches": 2}
    cases = {
        f"{model}_3d_{name}": (model, make_plan(model, sharding=boundary, recompute="full", **mesh))
        for model in ("gpt", "llama")
        for boundary, name in BOUNDARIES.items()
    }
    cases = {name: case for name, case in cases.items() if (name == "llama_3d_sequence") == (which == "by default")}
    assert_equal_to_one_process(tmp_path, cases, n_ranks=8)


@pytest.mark.parametrize(
    ("n_ranks", "seeds"),
    [
        (3, (None,)),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in ((3, (0, 2)), (2, (None, 0, 2)), (4, (None, 0, 2)))
        ),
    ],
    ids=["3 ranks", "3 ranks, any assignment", "2 ranks", "4 ranks"],
)
def test_a_vocabulary_and_sizes_that_do_not_divide_equal_one_process(tmp_path, n_ranks, seeds):
    cases = {
        f"{model}_{boundary[0]}_{seed}": (
            model,
            make_plan(model, seed=seed, tp=n_ranks, sharding=boundary, micro_batch_size=2, recompute="full"),
        )
        for model in ("gpt_odd", "llama_odd")
        for seed in seeds
        for boundary in shardings_of(model, n_ranks, seed)
    }
    meshes = {
        "zero3": {"dp": 2, "zero_stage": 3, "zero_shard_degree": 2},
        "pp2": {"pp": 2, "n_micro_batches": 2},
    }
    if n_ranks == 4:
        for model, boundary in (("gpt_odd", "S(1)"), ("llama_odd", "R")):
            for name, mesh in meshes.items():
                cases[f"{model}_tp2_{name}"] = (model, make_plan(model, tp=2, sharding=boundary, **mesh))
    assert any("+" in layout for _, plan in cases.values() for a in plan.shardings for _, layout in a.values)
    assert_equal_to_one_process(tmp_path, cases, n_ranks=n_ranks)


@pytest.mark.parametrize(
    ("n_ranks", "seed"),
    [(2, 0), *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((2, 1), (4, 0), (4, 1)))],
)
def test_whatever_assignment_the_solver_may_pick_equals_one_process(tmp_path, n_ranks, seed):
    cases = {
        f"{model}_{name}_{seed}": (model, make_plan(model, seed=seed, tp=n_ranks, sharding=boundary))
        for model in ("gpt", "llama")
        for boundary, name in BOUNDARIES.items()
    }
    assert_equal_to_one_process(tmp_path, cases, n_ranks=n_ranks)
