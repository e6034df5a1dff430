"""Launch scripts: what they pass on, whatever the names; signals of Slurm; two hosts with networks of their own."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from distributed import tiny_gpt
from distributed.hosts import ADDRESSES, two_hosts
from test_runtime_program import emit
from yaml import safe_load

from autoplan.output.launch_scripts import (
    LaunchGroup,
    mixed_torchrun_script,
    resource_name,
    slurm_script,
    torchrun_script,
    train_job,
)
from autoplan.runtime import Config, PlainTraining, global_batch

HOSTILE = "ck $(touch pwned); `id` \"'*\n&& x"
ECHO = '#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done > "$WORDS"\n'


def stub(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def environment(tmp_path, **variables):
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "WORDS": str(tmp_path / "words"), **variables}


def words_of_torchrun(tmp_path, script, **variables):
    """The arguments that a script gives torchrun."""
    (tmp_path / "plan" / "launch").mkdir(parents=True, exist_ok=True)
    path = tmp_path / "plan" / "launch" / "torchrun.sh"
    path.write_text(script)
    stub(tmp_path / "bin", "torchrun", ECHO)
    subprocess.run(["bash", str(path), "--steps", "7"], env=environment(tmp_path, **variables), check=True)
    return (tmp_path / "words").read_text().split("\0")[:-1]


def test_a_folder_for_checkpoints_is_one_word_whatever_its_name_and_brings_restarts(tmp_path):
    script = torchrun_script(n_hosts=1, n_devices_per_host=2)
    words = words_of_torchrun(tmp_path, script, CHECKPOINT_DIR=f"/{HOSTILE}")
    restarts = ["--max-restarts", "3"]
    assert words == [
        "--standalone", "--nproc-per-node", "2", *restarts, "train.py", "--checkpoint-dir", f"/{HOSTILE}",
        "--steps", "7",
    ]  # fmt: skip
    assert not list(tmp_path.rglob("pwned"))
    words = words_of_torchrun(tmp_path, script, CHECKPOINT_DIR="ck", MAX_RESTARTS="9")
    assert words[words.index("--max-restarts") + 1] == "9"


def test_a_relative_folder_for_checkpoints_lies_where_the_script_was_started(tmp_path, monkeypatch):
    (tmp_path / HOSTILE).mkdir()
    monkeypatch.chdir(tmp_path / HOSTILE)
    words = words_of_torchrun(tmp_path, torchrun_script(n_hosts=1, n_devices_per_host=2), CHECKPOINT_DIR="my runs/1")
    assert words[words.index("--checkpoint-dir") + 1] == f"{tmp_path / HOSTILE}/my runs/1"


def test_without_a_folder_for_checkpoints_nothing_is_restarted(tmp_path):
    words = words_of_torchrun(tmp_path, torchrun_script(n_hosts=2, n_devices_per_host=2), MASTER_ADDR="host")
    assert "--checkpoint-dir" not in words
    assert words[words.index("--max-restarts") + 1] == "0"


def test_hosts_of_several_kinds_get_the_same_options(tmp_path):
    script = mixed_torchrun_script([LaunchGroup("a", 1, 8), LaunchGroup("b", 1, 4)])
    given = {"CHECKPOINT_DIR": HOSTILE, "MASTER_ADDR": "host", "NODE_RANK": "1"}
    words = words_of_torchrun(tmp_path, script, **given)
    assert words[words.index("--nproc-per-node") + 1] == "4"
    assert words[-4:] == ["--checkpoint-dir", f"{Path.cwd()}/{HOSTILE}", "--steps", "7"]


@pytest.mark.parametrize(
    "script",
    [torchrun_script(n_hosts=1, n_devices_per_host=2), mixed_torchrun_script([LaunchGroup("a", 1, 8)])],
    ids=["equal hosts", "mixed"],
)
def test_without_torchrun_scripts_say_what_to_activate(tmp_path, script):
    (tmp_path / "torchrun.sh").write_text(script)
    environment = {"PATH": str(tmp_path), "MASTER_ADDR": "host", "NODE_RANK": "0"}
    done = subprocess.run(
        [shutil.which("bash"), str(tmp_path / "torchrun.sh")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 127
    assert done.stderr == "torchrun: not found; activate the Python environment that has torch, and start this again\n"


def test_slurm_tells_the_programs_to_stop_before_the_time_limit_and_queues_the_job_again(tmp_path):
    (tmp_path / "job.sbatch").write_text(slurm_script("job", n_hosts=2, n_devices_per_host=8))
    subprocess.run(["bash", "-n", str(tmp_path / "job.sbatch")], check=True)
    stub(tmp_path / "bin", "scontrol", '#!/bin/sh\necho "$@" >> "$LOG"\n')
    # stand for scancel, which signals the programs themselves, and for srun, which kills them when told to stop (seen
    # with Slurm 22.05): here USR2 is a program's signal, upon which it saves and ends with 143
    stub(tmp_path / "bin", "scancel", '#!/bin/sh\necho "$@" >> "$LOG"\nkill -USR2 "$(cat "$LOG.srun")"\n')
    stub(
        tmp_path / "bin",
        "srun",
        "#!/usr/bin/env bash\ntrap 'echo saved >> \"$LOG\"; exit 143' USR2\n"
        "trap 'echo killed >> \"$LOG\"; exit 1' TERM\n"
        'echo $$ > "$LOG.srun"\necho started "${@: -4}" >> "$LOG"\nwhile :; do sleep 0.05; done\n',
    )
    log = tmp_path / "log"
    variables = {"LOG": str(log), "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "a,b"}
    job = subprocess.Popen(
        ["bash", str(tmp_path / "job.sbatch"), "--steps", "9"],
        env=environment(tmp_path, CHECKPOINT_DIR="ck", **variables),
    )
    deadline_s = time.monotonic() + 20
    while "started" not in (log.read_text() if log.exists() else "") and time.monotonic() < deadline_s:
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=20) != 0
    assert log.read_text().splitlines() == [
        "show hostnames a,b", f"started --checkpoint-dir {tmp_path}/ck --steps 9", "--signal=TERM 77", "saved",
        "requeue 77",
    ]  # fmt: skip


def test_train_job_saves_to_a_volume_and_restarts():
    text = train_job(HOSTILE, n_hosts=2, n_devices_per_host=8)
    assert 'command: ["torchrun", "train.py", "--checkpoint-dir", "/checkpoints"]' in text
    spec = safe_load(text)["spec"]
    assert {"name": "PET_MAX_RESTARTS", "value": "3"} in spec["trainer"]["env"]
    assert {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "300"} in spec["trainer"]["env"]
    (patch,) = spec["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert replicated["name"] == "node" and pod["terminationGracePeriodSeconds"] == 300
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert mounts == {"checkpoints": "/checkpoints", "shared-memory": "/dev/shm"}
    assert volumes["checkpoints"] == {"persistentVolumeClaim": {"claimName": "REPLACE-WITH-YOUR-VOLUME-CLAIM"}}
    assert volumes["shared-memory"] == {"emptyDir": {"medium": "Memory"}}


# What the definition of TrainJob in Kubeflow Trainer 2.3.0 (2026-08-06) says of the fields that are written, compared
# with its openAPIV3Schema on 2026-11-28; a cluster drops or refuses every other field. `!` marks those that it demands,
# and `spec`, without which there is no job.
NAMES_AND_VALUES = [{"name!": str, "value": str}]
POD = {
    "terminationGracePeriodSeconds": int,
    "containers": [{"name!": str, "volumeMounts": [{"name!": str, "mountPath!": str}]}],
    "volumes": [{"name!": str, "persistentVolumeClaim": {"claimName!": str}, "emptyDir": {"medium": str}}],
}
JOBS = [{"name!": str, "template": {"spec": {"template": {"spec": POD}}}}]
TRAIN_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec!": {
        "runtimeRef!": {"name!": str, "apiGroup": str, "kind": str},
        "runtimePatches": [{"manager!": str, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": JOBS}}}}],
        "trainer": {
            "image": str,
            "command": [str],
            "args": [str],
            "env": NAMES_AND_VALUES,
            "numNodes": int,
            "numProcPerNode": int,
            "resourcesPerNode": {"limits": {"nvidia.com/gpu": int}},
        },
    },
}


def faults(value, schema, where=""):
    """Where a value has a field that its schema does not know, lacks one, or holds another kind of value."""
    if isinstance(schema, list):
        items = value if isinstance(value, list) else [where]
        return [fault for index, item in enumerate(items) for fault in faults(item, schema[0], f"{where}[{index}]")]
    if not isinstance(schema, dict):
        return [] if type(value) is schema else [f"{where}: {value!r}"]
    if not isinstance(value, dict):
        return [f"{where}: {value!r}"]
    known = {name.removesuffix("!"): inner for name, inner in schema.items()}
    wrong = [f"{where}.{name}: unknown" for name in value.keys() - known.keys()]
    wrong += [f"{where}.{name} lacks" for name in schema if name.endswith("!") and name[:-1] not in value]
    return wrong + [
        fault for name in value.keys() & known.keys() for fault in faults(value[name], known[name], f"{where}.{name}")
    ]


def test_train_job_has_the_fields_that_its_definition_knows_and_demands():
    job = safe_load(train_job(HOSTILE, n_hosts=2, n_devices_per_host=8))
    assert faults(job, TRAIN_JOB) == []
    job["spec"]["podTemplateOverrides"] = job["spec"].pop("runtimePatches")  # as in Trainer 2.1
    del job["spec"]["runtimeRef"]["name"]
    job["spec"]["trainer"]["numNodes"] = "2"
    found = faults(job, TRAIN_JOB)
    assert sorted(found) == [
        ".spec.podTemplateOverrides: unknown", ".spec.runtimeRef.name! lacks", ".spec.trainer.numNodes: '2'",
    ]  # fmt: skip


def test_names_leave_room_for_what_kubernetes_adds_to_those_of_pods():
    # 63 characters: NAME-node-0-HOST-xxxxx, where HOST has up to 4 digits
    name = resource_name("x" * 100)
    assert len(f"{name}-node-0-9999-xxxxx") == 63
    assert resource_name("--").isalpha() and not resource_name("x" * 35 + "-y").endswith("-")


def shell_scripts():
    yield "torchrun.sh", torchrun_script(n_hosts=1, n_devices_per_host=8)
    yield "torchrun_2.sh", torchrun_script(n_hosts=2, n_devices_per_host=8)
    yield "job.sbatch", slurm_script(HOSTILE, n_hosts=2, n_devices_per_host=8)
    yield "mixed.sh", mixed_torchrun_script([LaunchGroup("a", 1, 8), LaunchGroup("b", 2, 4)])


def test_shellcheck_finds_nothing_in_the_scripts(tmp_path):
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("needs shellcheck")
    for name, text in shell_scripts():
        (tmp_path / name).write_text(text)
    command = [shellcheck, *sorted(tmp_path.iterdir())]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


DYING = """

import os
import pathlib
import signal
import time

n_calls = 0
whole_loss = loss_fn


def loss_fn(outputs, targets):
    global n_calls
    n_calls += 1
    mark = pathlib.Path(__file__).with_name("died")
    if n_calls == 4 and os.environ["GROUP_RANK"] == "1" and not mark.exists():
        mark.touch()
        while not pathlib.Path("saved/step-00000002").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return whole_loss(outputs, targets)
"""


@pytest.fixture
def hosts(tmp_path):
    """What runs a command on the first of two hosts, and on the second; each has a network of its own."""
    with ExitStack() as stack:
        try:
            found = stack.enter_context(two_hosts(tmp_path))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no namespaces of the kernel, made by unshare, nsenter and ip: {error}")
        yield found


@pytest.mark.nightly
def test_two_hosts_go_on_together_after_a_rank_of_the_second_was_killed(tmp_path, hosts):
    config = {"dp": 2, "zero_stage": 3, "zero_shard_degree": 2, "precision": "fp64"}
    emit(tmp_path, config=config, has_parallel_model=False)
    with (tmp_path / "model.py").open("a") as file:
        file.write(DYING)
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "torchrun.sh").write_text(torchrun_script(n_hosts=2, n_devices_per_host=1))
    stub(tmp_path / "bin", "torchrun", f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    saved = str(tmp_path / "saved")  # a host's commands start in /
    variables = {"MASTER_ADDR": next(iter(ADDRESSES)), "CHECKPOINT_DIR": saved, "OMP_NUM_THREADS": "1"}
    options = ("--steps", "6", "--device", "cpu", "--lr", "1e-2", "--checkpoint-every", "2")
    agents = [
        subprocess.Popen(
            [*on_host, "bash", str(tmp_path / "launch" / "torchrun.sh"), *options],
            env={**environment(tmp_path, **variables), "PYTHONPATH": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for on_host in hosts
    ]
    done = [agent.communicate(timeout=240) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], done
    assert (tmp_path / "died").exists()
    assert f"resumed from {saved}/step-00000002" in done[0][1] + done[1][1]
    lines = re.findall(r"step +(\d+)  loss ([\d.]+)", done[0][0] + done[1][0])
    found = {int(step): float(loss) for step, loss in lines}
    cpu = torch.device("cpu")
    plain = PlainTraining(Config(**config), tiny_gpt, build_device=cpu, device=cpu, learning_rate=1e-2)
    for step in range(6):
        batch = global_batch(tiny_gpt.make_batch, batch_size=2, seed=0, step=step)
        assert abs(found[step] - plain.step(batch)) < 1e-6
