"""The emitted program as people train with it: real data, workers, evaluation, a schedule, logs that go on."""

import json
import math
import shutil
import sys
import types
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed.launch import run_folder

import autoplan.runtime
from autoplan.codegen.libraries import libraries_of
from autoplan.codegen.train_script import train_script
from autoplan.options import PRECISIONS, TORCH_PRECISIONS
from autoplan.runtime.config import Config
from autoplan.runtime.metrics import EvaluationRecord, MetricLog, PlannedFigures, StepRecord
from autoplan.runtime.refusal import OptionError, OutputError
from autoplan.runtime.step_trace import StepTrace
from autoplan.runtime.train import train_steps, write_records
from autoplan.runtime.update.learning_rate import LearningRate

CHECKOUT = Path(__file__).parent.parent
TEXT = CHECKOUT / "examples" / "data" / "stories.txt"
RECORD = StepRecord(
    step=3, loss=1.5, grad_norm=math.inf, learning_rate=1e-3, step_s=0.5, data_wait_s=0.25, samples_per_s=8.0,
    peak_allocated_bytes=None, peak_reserved_bytes=None, tokens_per_s=800.0, mfu=0.5,
)  # fmt: skip


def test_a_text_is_learned_on_two_ranks_with_workers_evaluation_and_a_log_that_a_second_run_goes_on(tmp_path):
    shutil.copytree(
        Path(autoplan.runtime.__file__).parent, tmp_path / "runtime", ignore=shutil.ignore_patterns("__*__")
    )
    shutil.copy(Path(autoplan.runtime.__file__), tmp_path / "runtime")
    shutil.copy(CHECKOUT / "examples" / "text_gpt.py", tmp_path / "model.py")
    config = {"dp": 2, "zero_stage": 2, "zero_shard_degree": 2, "micro_batch_size": 8, "blocks": ("blocks.0",)}
    overrides = {"n_layers": 1, "width": 64, "context": 64, "text": str(TEXT)}
    workload = {"tokens_per_sample": 64}
    text = train_script(
        header="Train.", config=config, overrides=overrides, workload=workload, has_parallel_model=False
    )
    (tmp_path / "train.py").write_text(text)
    options = [
        "--steps",
        "40",
        "--device",
        "cpu",
        "--lr-schedule",
        "cosine",
        "--warmup-steps",
        "5",
        "--min-lr",
        "3e-4",
        "--clip",
        "1",
        "--workers",
        "1",
    ]
    (tmp_path / "log.jsonl").write_text('{"step": 0}\n{"step": 1, "lo')  # of a run that was killed
    done = run_folder(tmp_path, 2, *options, "--eval-every", "20", "--eval-batches", "4", "--log-jsonl", "log.jsonl")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 42 and "tokens/s" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert rows.pop(0) == {"step": 0}
    steps, evaluations = ([row for row in rows if key in row] for key in ("loss", "eval_loss"))
    assert [row["step"] for row in steps] == list(range(40)) and [row["step"] for row in evaluations] == [19, 39]
    rates = LearningRate("cosine", n_steps=40, warmup_steps=5, smallest=3e-4)
    assert [row["learning_rate"] for row in steps] == pytest.approx([rates.at(t, largest=3e-3) for t in range(40)])
    # random guessing of 128 characters is 4.85, their frequencies alone give 2.9
    assert steps[0]["loss"] > 4.5 and steps[-1]["loss"] < 2.6
    assert evaluations[1]["eval_loss"] == pytest.approx(steps[-1]["loss"], abs=0.3)
    for row in steps:
        assert row["samples_per_s"] == pytest.approx(16 / (row["step_s"] + row["data_wait_s"]))
        assert row["tokens_per_s"] == pytest.approx(64 * row["samples_per_s"])
        assert row["mfu"] is None


def test_a_record_says_what_is_known_and_json_has_no_infinity(tmp_path, capsys):
    with MetricLog(rank=0, jsonl=tmp_path / "new" / "log.jsonl") as log:
        log.write(RECORD)
        assert json.loads((tmp_path / "new" / "log.jsonl").read_text())["grad_norm"] is None  # already flushed
        log.write(EvaluationRecord(step=3, eval_loss=1.25, n_batches=2, eval_s=0.1))
    with MetricLog(rank=1, jsonl=tmp_path / "other.jsonl") as silent:
        silent.write(RECORD)
    assert not (tmp_path / "other.jsonl").exists()
    assert capsys.readouterr().out.splitlines() == [
        "step     3  loss 1.500000  grad norm inf  lr 1.00e-03  0.5000 s  800 tokens/s  MFU 50.0%  data 250.0 ms",
        "step     3  evaluation loss 1.250000  2 batches  0.1000 s",
    ]


def test_the_figures_of_all_steps_are_json_that_any_reader_takes(tmp_path):
    mesh = types.SimpleNamespace(rank=0, device=torch.device("cpu"))
    model = types.SimpleNamespace(mesh=mesh, config=Config())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        write_records(tmp_path / "new" / "steps.json", model, [RECORD])
    finally:
        dist.destroy_process_group()
    text = (tmp_path / "new" / "steps.json").read_text()
    (step,) = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["steps"]
    assert (step["grad_norm"], step["loss"]) == (None, 1.5)


@pytest.fixture
def parse(monkeypatch):
    """What a program makes of its command line; `parse.model` is its model file."""
    return parser_of(monkeypatch, {})


def parser_of(monkeypatch, config):
    model = types.ModuleType("model")
    monkeypatch.setitem(sys.modules, "runtime", autoplan.runtime)
    monkeypatch.setitem(sys.modules, "model", model)
    program = {"__name__": "train"}
    exec(train_script(header="Train.", config=config, has_parallel_model=False), program)

    def parsed(*options):
        monkeypatch.setattr(sys, "argv", ["train.py", *options])
        return program["parse_arguments"]()

    parsed.model, parsed.program = model, program
    return parsed


def test_dtype_takes_the_names_of_the_planner_and_those_of_torch(parse, capsys):
    precisions = parse.program["PRECISIONS"]
    for ours in PRECISIONS:
        assert precisions[parse("--dtype", ours).dtype] == ours
    for torchs, ours in TORCH_PRECISIONS.items():
        assert precisions[parse("--dtype", torchs).dtype] == ours
    with pytest.raises(SystemExit):
        parse("--dtype", "fp8")
    assert "invalid choice: 'fp8'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["fp64", "float64"])
def test_float64_is_refused_where_the_model_fails_in_it(monkeypatch, capsys, name):
    parsed = parser_of(monkeypatch, {"fails_in_float64": True})
    with pytest.raises(SystemExit):
        parsed("--check", "--dtype", name)
    assert "found float64" in (told := capsys.readouterr().err) and "fix: --dtype float32" in told
    assert parsed("--check", "--dtype", "float32").check and parsed("--check").check


@pytest.mark.parametrize(
    "option",
    [
        "--steps -1", "--timeout 0", "--timeout inf", "--lr -1", "--lr nan", "--warmup-steps -1", "--min-lr -1",
        "--clip 0", "--workers -1", "--repeat-batches 0", "--eval-every -5", "--eval-batches 0",
        "--checkpoint-every 0", "--keep 0", "--steps many", "--seed 9223372036854775808",
    ],
)  # fmt: skip
def test_a_number_that_means_nothing_is_a_usage_error_that_says_what_is_expected(parse, capsys, option):
    with pytest.raises(SystemExit) as end:
        parse(*option.split())
    assert end.value.code == 2
    name, value = option.split()
    assert f"argument {name}: found {value!r}, expected a" in capsys.readouterr().err


def test_a_smallest_rate_above_the_largest_is_a_usage_error(parse, capsys):
    with pytest.raises(SystemExit):
        parse("--lr-schedule", "cosine", "--min-lr", "1")
    assert "argument --min-lr: found 1, expected at most --lr 0.0003" in capsys.readouterr().err
    parse.model.build_optimizer = lambda parameters: None  # whose rate is not known yet
    assert parse("--lr-schedule", "cosine", "--min-lr", "1").min_lr == 1.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--eval-batches 3", "argument --eval-batches: does nothing without --eval-every"),
        ("--checkpoint-every 100", "argument --checkpoint-every: does nothing without --checkpoint-dir"),
        ("--keep 3", "argument --keep: does nothing without --checkpoint-dir"),
        ("--profile-dir a", "argument --profile-dir: does nothing without --profile-steps"),
        ("--min-lr 1e-5", "argument --min-lr: does nothing without --lr-schedule cosine or linear"),
        ("--resume auto", "argument --resume: auto does nothing without --checkpoint-dir"),
        ("--resume none", "argument --resume: none does nothing without --checkpoint-dir"),
        ("--fill-last-batch", "--fill-last-batch: does nothing, as the model file has no build_dataset()"),
        ("--workers 2", "--workers: does nothing, as the model file has no build_dataset()"),
        ("--repeat-batches 4 --fill-last-batch", "--fill-last-batch: does nothing with --repeat-batches"),
        ("--repeat-batches 4 --workers 2", "--workers: does nothing with --repeat-batches"),
        ("--check --repeat-batches 4", "--repeat-batches: does nothing with --check"),
        ("--check --fill-last-batch", "--fill-last-batch: does nothing with --check"),
        ("--check --workers 2", "--workers: does nothing with --check"),
        ("--init-from a --resume b", "--init-from and --resume PATH both say where to start: leave one out"),
        ("--check --checkpoint-dir a", "from its start: leave out --checkpoint-dir"),
        ("--check --export a.safetensors", "from its start: leave out --export"),
        ("--check --init-from a", "from its start: leave out --init-from"),
        ("--check --resume a", "from its start: leave out --resume"),
        ("--check --profile-steps 1:2", "from its start: leave out --profile-steps"),
        ("--alone 0 --check", "and no more: leave out --check"),
        ("--alone 0 --checkpoint-dir a --resume b", "and no more: leave out --checkpoint-dir"),
        ("--alone 0 --eval-every 2", "and no more: leave out --eval-every"),
        ("--alone 0 --log-jsonl a", "and no more: leave out --log-jsonl"),
        ("--checkpoint-dir ", "argument --checkpoint-dir: found '', expected a path"),
        ("--tensorboard ", "argument --tensorboard: found '', expected a path"),
    ],
)
def test_options_that_would_do_nothing_or_contradict_each_other_are_usage_errors(parse, capsys, options, said):
    with pytest.raises(SystemExit) as end:
        parse(*options.split(" "))
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_options_that_do_something_beside_others_are_taken(parse):
    parse.model.build_dataset = lambda: []
    for options in (
        "--workers 2 --fill-last-batch",
        "--repeat-batches 4 --workers 2 --eval-every 5",
        "--check --workers 2 --eval-every 5",
        "--lr-schedule linear --min-lr 1e-5",
        "--checkpoint-dir a --resume auto",
        "--profile-steps 1:2 --profile-dir a",
    ):
        parse(*options.split())


def test_options_that_the_model_file_replaces_are_said_by_the_first_rank(parse, capsys, monkeypatch):
    assert parse("--lr", "1").lr == 1.0 and parse().lr == 3e-4
    assert capsys.readouterr().err == ""
    parse.model.build_optimizer = parse.model.build_scheduler = lambda *_: None
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        parse("--lr", "1", "--lr-schedule", "cosine", "--warmup-steps", "5")
        parse("--min-lr", "1e-5")
    assert capsys.readouterr().err == (
        "--lr: without effect, as the model file has build_optimizer()\n"
        "--lr-schedule, --warmup-steps: without effect, as the model file has build_scheduler()\n"
        "--min-lr: without effect, as the model file has build_scheduler()\n"
    )


def test_a_command_line_is_explained_by_the_first_process_of_a_host(parse, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("autoplan.runtime.refusal.time.sleep", lambda _: None)
    monkeypatch.setattr("autoplan.runtime.refusal.signal.signal", lambda *_: capsys.readouterr())
    with pytest.raises(SystemExit):
        parse("--help")
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit):
        parse("--clip", "0")
    assert "--clip: found '0'" in capsys.readouterr().err  # after those seconds: it may be alone with it


@pytest.mark.parametrize("name", ["--log-jsonl", "--out-json", "--tensorboard"])
def test_what_cannot_be_written_is_a_usage_error_of_the_rank_that_writes(parse, capsys, monkeypatch, tmp_path, name):
    (tmp_path / "file").touch()
    kind = "folder" if name == "--tensorboard" else "file"
    wrong = {tmp_path / "file" / "x": f"expected a {kind} that can be written: {tmp_path / 'file'} cannot"}
    wrong[tmp_path / ("file" if kind == "folder" else "")] = f"expected a {kind}\n"
    for path, expected in wrong.items():
        with pytest.raises(SystemExit):
            parse(name, str(path))
        assert f"argument {name}: found {str(path)!r}, {expected}" in capsys.readouterr().err
    new = str(tmp_path / "new" / "x")
    assert getattr(parse(name, new), name.strip("-").replace("-", "_")) == Path(new)
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr("os.access", lambda path, mode: path != str(tmp_path))  # read-only
    with pytest.raises(SystemExit):
        parse(name, new)
    monkeypatch.setenv("RANK", "1")
    parse(name, new)


def test_a_run_that_has_its_steps_says_that_nothing_is_left_to_do(capsys):
    mesh = types.SimpleNamespace(rank=0, device=torch.device("cpu"))
    config = types.SimpleNamespace(precision="fp32")
    model = types.SimpleNamespace(n_steps=12, mesh=mesh, config=config)
    data = types.SimpleNamespace(close=lambda: None)
    for n_steps in (6, 12):
        assert list(train_steps(model, data, n_steps=n_steps)) == []
        assert "nothing is left to do\n  fix: --steps 13 or more" in capsys.readouterr().err
    assert list(train_steps(model, data, n_steps=0)) == []  # to save or export what is there
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (range(3, 12), "--profile-steps: found 3:12, and 12 are done, so none is traced\n"),
        (range(3, 14), "--profile-steps: found 3:14, and 12 are done, so the others are traced\n"),
        (range(12, 14), ""),
    ],
)
def test_steps_to_trace_that_are_done_are_said_not_to_be_traced(capsys, steps, said):
    mesh = types.SimpleNamespace(rank=0, device=torch.device("cpu"))
    model = types.SimpleNamespace(n_steps=12, mesh=mesh, config=types.SimpleNamespace(precision="fp32"))
    data, trace = types.SimpleNamespace(close=lambda: None), types.SimpleNamespace(steps=steps)
    assert list(train_steps(model, data, n_steps=0, trace=trace)) == []
    assert capsys.readouterr().err == said


def test_a_full_disk_ends_a_run_with_the_file_that_could_not_be_written():
    expected = "/dev/full: cannot be written: No space left on device\n  fix: make room, or choose another place"
    with pytest.raises(OutputError, match=expected), MetricLog(rank=0, jsonl=Path("/dev/full")) as log:
        log.write(RECORD)


def test_traces_need_a_folder_that_can_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=f"{tmp_path}/file: cannot be written: File exists"):
        StepTrace(range(1, 2), tmp_path / "file", types.SimpleNamespace(rank=1), n_steps=3)


def test_a_terminal_keeps_one_line_for_all_steps(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with MetricLog(rank=0) as log:
        log.write(RECORD)
        log.write(RECORD)
        log.say("done")
    lines = capsys.readouterr().out.split("\n")
    assert lines[0].count("\rstep     3") == 2 and lines[1:] == ["done", ""]


def test_a_terminal_shows_how_many_steps_are_done_and_how_long_the_others_take(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("time.monotonic", iter([100.0, 102.0, 106.0]).__next__)
    with MetricLog(rank=0, n_steps=50) as log:
        for step in (9, 10, 11):  # a run that goes on from step 9
            log.write(replace(RECORD, step=step))
    found = [line.partition("  loss")[0] for line in capsys.readouterr().out.split("\r")]
    # 38 steps are left after two more in 6 s: 114 s
    assert found[1:] == ["[##--------] 10/50", "[##--------] 11/50  0:01:18 left", "[##--------] 12/50  0:01:54 left"]


def test_mfu_is_given_on_the_planned_device_only():
    workload = PlannedFigures(flops_per_sample=2 * 10**12, peak_flops_per_s=1e13, device="Toy 1T")
    # 8 samples/s x 2 TFLOP / (4 devices x 10 TFLOP/s) = 0.4
    assert workload.mfu(8.0, n_devices=4, device="Toy 1T") == pytest.approx(0.4)
    assert workload.mfu(8.0, n_devices=4, device="Toy 2T") is None
    assert workload.tokens_per_s(8.0) is None


@pytest.mark.parametrize(("precision", "rank", "is_said"), [("bf16", 0, True), ("bf16", 1, False), ("fp32", 0, False)])
def test_16_bits_on_a_cpu_are_said_to_be_slow(capsys, precision, rank, is_said):
    mesh = types.SimpleNamespace(rank=rank, device=torch.device("cpu"))
    model = types.SimpleNamespace(n_steps=0, mesh=mesh, config=types.SimpleNamespace(precision=precision))
    assert list(train_steps(model, types.SimpleNamespace(close=lambda: None), n_steps=0)) == []
    assert ("fix: --dtype float32" in capsys.readouterr().err) is is_said


@pytest.mark.parametrize(("compiles", "rank", "is_said"), [(True, 0, True), (True, 1, False), (False, 0, False)])
def test_a_first_step_that_compiles_is_said_to_take_longest(capsys, compiles, rank, is_said):
    mesh = types.SimpleNamespace(rank=rank, device=torch.device("cpu"))
    config = types.SimpleNamespace(precision="fp32", compile=compiles)
    model = types.SimpleNamespace(n_steps=0, mesh=mesh, config=config)
    data = types.SimpleNamespace(close=lambda: None)
    with pytest.raises(TypeError, match="iterator"):
        next(train_steps(model, data, n_steps=1))
    assert ("the first step compiles" in capsys.readouterr().err) is is_said


def test_libraries_of_other_versions_than_planned_with_are_named(capsys):
    text = "import json\nimport torch\n\ndef build_model():\n    from transformers import BertModel\n"
    installed = metadata.version("transformers")
    assert libraries_of((text,)) == (("transformers", installed),)
    assert list(PlannedFigures(libraries=(("transformers", installed),)).other_libraries()) == []
    planned = PlannedFigures(libraries=(("transformers", "4.0"), ("no-such-library", "1.0")))
    mesh = types.SimpleNamespace(rank=0, device=torch.device("cpu"))
    config = types.SimpleNamespace(precision="fp32")
    model = types.SimpleNamespace(n_steps=0, mesh=mesh, config=config)
    data = types.SimpleNamespace(close=lambda: None)
    assert list(train_steps(model, data, n_steps=0, planned=planned)) == []
    lines = [line for line in capsys.readouterr().err.splitlines() if "fix: " not in line]
    assert [line.partition(", so")[0] for line in lines] == [
        f"transformers: found {installed}, planned with 4.0",
        "no-such-library: found none, planned with 1.0",
    ]


def test_tensorboard_gets_every_curve_and_its_absence_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptionError, match="the package tensorboard is not installed\n  fix: pip install tensorboard"):
        MetricLog(rank=0, tensorboard=tmp_path)
    seen = []

    class SummaryWriter:
        def __init__(self, folder):
            assert folder == str(tmp_path)

        def add_scalar(self, name, value, step):
            seen.append((name, value, step))

        def close(self):
            seen.append("closed")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    with MetricLog(rank=0, tensorboard=tmp_path) as log:
        log.write(RECORD)
    assert ("train/loss", 1.5, 3) in seen and ("speed/mfu", 0.5, 3) in seen and seen[-1] == "closed"
    assert not any(value is None for _, value, _ in seen[:-1])
