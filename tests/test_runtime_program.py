"""The emitted folder runs where autoplan cannot be imported, and says whether it trains as one process."""

import ast
import gzip
import json
import re
import shutil
from pathlib import Path

import pytest
from distributed.launch import ends_of_program, run_folder, run_program

import autoplan.runtime
from autoplan.codegen.train_script import train_script

HERE = Path(__file__).parent
CHECK = ("--steps", "3", "--device", "cpu", "--dtype", "float64", "--check")
PARALLEL_MODEL = """\
from tiny_parallel import parallel_model

globals().update(vars(parallel_model(tp_degree=2, n_stages=2)))
"""


def emit(folder, *, config, has_parallel_model):
    """A folder as `autoplan plan --out` writes it, with the hand-written parallel model."""
    shutil.copytree(Path(autoplan.runtime.__file__).parent, folder / "runtime", ignore=shutil.ignore_patterns("__*__"))
    shutil.copy(Path(autoplan.runtime.__file__), folder / "runtime")
    shutil.copy(HERE / "distributed" / "tiny_gpt.py", folder / "model.py")
    if has_parallel_model:
        text = (HERE / "distributed" / "tiny_parallel.py").read_text()
        (folder / "tiny_parallel.py").write_text(
            text.replace("autoplan.runtime", "runtime").replace(".tiny_gpt", "model")
        )
        (folder / "parallel_model.py").write_text(PARALLEL_MODEL)
    script = train_script(header="Train.", config=config, has_parallel_model=has_parallel_model)
    (folder / "train.py").write_text(script)


def test_program_with_tensor_and_pipeline_parallelism_equals_one_process_and_reports_every_step(tmp_path):
    config = {"tp": 2, "pp": 2, "micro_batch_size": 2, "n_micro_batches": 2, "precision": "bf16"}
    emit(tmp_path, config=config, has_parallel_model=True)
    first, *others = run_program(tmp_path, 4, *CHECK, "--out-json", "new/result.json")
    assert [line.split()[1] for line in first.splitlines()] == ["0", "1", "2"]
    assert others == ["", "", ""]
    report = json.loads((tmp_path / "new" / "result.json").read_text())
    assert report["config"]["precision"] == "fp64"
    assert len(report["steps"]) == 3
    for step in report["steps"]:
        assert max(step["differences"].values()) <= 1e-9
        # 1 dp rank x 2 micro-batches x 2 samples = 4 samples
        assert step["samples_per_s"] == pytest.approx(4 / step["step_s"])


def test_profiled_step_of_every_rank_is_the_sum_of_its_parts(tmp_path):
    config = {"tp": 2, "pp": 2, "micro_batch_size": 2, "n_micro_batches": 2, "precision": "fp64"}
    emit(tmp_path, config=config, has_parallel_model=True)
    options = ("--steps", "4", "--device", "cpu", "--profile-steps", "2:4", "--out-json", "result.json")
    first, *_ = run_program(tmp_path, 4, *options)
    assert first.splitlines()[-1].startswith("profiled step ")
    report = json.loads((tmp_path / "result.json").read_text())
    # step 1 warms the profiler up, which makes it slow as well
    assert [step["is_profiled"] for step in report["steps"]] == [False, True, True, True]
    for rank in range(4):
        with gzip.open(tmp_path / "profile" / f"rank{rank}.json.gz", "rt") as file:
            events = json.load(file)["traceEvents"]
        assert sum(e.get("cat") == "user_annotation" and e["name"] == "training step" for e in events) == 2
    profiles = report["profiled_step_per_rank"]
    assert len(profiles) == 4
    for profile in profiles:
        exposed_s = [part_s for kinds in profile["exposed_s"].values() for part_s in kinds.values()]
        parts_s = (profile["compute_s"], profile["optimizer_s"], profile["idle_s"], *exposed_s)
        assert sum(parts_s) == pytest.approx(profile["step_s"])
        assert profile["compute_s"] > 0.0 and profile["optimizer_s"] > 0.0 and sum(exposed_s) > 0.0
        assert 0.0 < profile["until_optimizer_s"] < profile["step_s"]
    # gloo names its calls: transfers of the pipeline, reductions of tensor parallelism
    assert {kind for profile in profiles for kind in profile["exposed_s"].get("pp", {})} == {"send_recv"}


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_program_that_forgets_to_reduce_gradients_fails_its_check_after_the_first_step(tmp_path, precision):
    emit(tmp_path, config={"dp": 2, "blocks": ("blocks.0",)}, has_parallel_model=False)
    zero = (tmp_path / "runtime" / "stages" / "zero.py").read_text()
    broken = zero.replace("reduces=zero_stage >= 2 or is_last_micro_batch", "reduces=False")
    assert broken != zero
    (tmp_path / "runtime" / "stages" / "zero.py").write_text(broken)
    done = run_folder(tmp_path, 2, *CHECK, "--dtype", precision)
    assert "exitcode  : 8" in done.stderr
    (line,) = done.stdout.splitlines()
    assert re.search(r"  DIFFERS from one process, most in the gradient of [a-z]\S+ \(\d\.\de[+-]\d\d\)$", line)
    assert ("fix: --dtype float64" in done.stderr) == (precision == "fp32")


def test_another_number_of_processes_than_planned_is_refused_before_the_first_step(tmp_path):
    emit(tmp_path, config={"dp": 3}, has_parallel_model=False)
    (told, printed), other = ends_of_program(tmp_path, 2, *CHECK)
    assert told.startswith("planned: 3 processes (pp 1 x dp 3 x tp 1); found: 2\n") and printed == ""
    assert other == (1, "")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--eval-every", "2"), "--eval-every: the model file has no build_eval_dataset()\n"),
        (("--profile-steps", "2:4"), "--profile-steps: found 2:4, expected steps below --steps = 3"),
    ],
)
def test_an_option_that_cannot_be_followed_ends_a_program_with_one_message_and_no_traceback(tmp_path, options, told):
    emit(tmp_path, config={"dp": 2}, has_parallel_model=False)
    (message, printed), other = ends_of_program(tmp_path, 2, "--steps", "3", "--device", "cpu", *options)
    assert message.startswith(told) and printed == "" and other == (1, "")


DATASETS = """

def samples(odd=()):
    \"\"\"48 samples; those at `odd` are a token too long.\"\"\"
    tokens = [torch.arange(SEQ + 1 + (i in odd)) for i in range(48)]
    return [(window[:-1], window[1:]) for window in tokens]


def build_dataset():
    return InOrder(samples({16 + 8 + 3}))


def build_eval_dataset():
    return samples({eval})


class InOrder:  # in the order of its samples, of which rank 1 gets the later ones of each batch of 16
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)
"""


def test_a_bad_sample_that_one_rank_meets_in_a_worker_ends_the_job_with_three_lines_and_no_traceback(tmp_path):
    emit(tmp_path, config={"dp": 2, "micro_batch_size": 8}, has_parallel_model=False)
    model = tmp_path / "model.py"
    model.write_text(model.read_text() + DATASETS.replace("{eval}", ""))
    done = run_folder(tmp_path, 2, "--steps", "3", "--device", "cpu", "--workers", "1", "--eval-every", "1")
    assert done.returncode == 1 and [line.split()[1] for line in done.stdout.splitlines()] == ["0", "0"]
    told, _, of_torchrun = done.stderr.partition("\n  fix: make them alike in the dataset")
    assert told.endswith(
        "model.py: build_dataset: inputs: found int64 [7] in sample 27, int64 [6] in others\n"
        "  expected: the same in all samples of a batch"
    )
    assert "Traceback" not in told and "[rank" not in done.stderr and "in sample 27" not in of_torchrun


def test_an_evaluation_set_that_the_model_cannot_take_ends_a_program_before_its_first_step(tmp_path):
    emit(tmp_path, config={"dp": 2, "micro_batch_size": 8}, has_parallel_model=False)
    model = tmp_path / "model.py"
    model.write_text(model.read_text() + DATASETS.replace("{eval}", "range(48)"))
    for told, printed in ends_of_program(tmp_path, 2, "--steps", "3", "--device", "cpu", "--eval-every", "3"):
        assert told.startswith(
            "model.py: build_eval_dataset: inputs: found int64 of shape [7] per sample, planned int64 of shape [6]"
        )
        assert printed == ""


def test_script_keeps_values_and_any_header():
    header = 'Plan of "a\\b": """quoted""" and {braces}'
    config = {"dp": 2, "recompute": ("blocks.0",), "precision": "bf16", "compile": True}
    tree = ast.parse(train_script(header=header, config=config, has_parallel_model=True, overrides={"size": "1b"}))
    assert ast.get_docstring(tree).startswith(header + "\n\n")
    assigned = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    assert {word.arg: ast.literal_eval(word.value) for word in assigned["PLAN"].keywords} == config
    assert ast.literal_eval(assigned["MODEL_OVERRIDES"]) == {"size": "1b"}
