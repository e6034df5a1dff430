"""Launch scripts: what they pass on, whatever the names; signals of Slurm; two hosts with networks of their own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
import torch
from distributed import tiny_gpt
from distributed.hosts import ADDRESSES, two_hosts
from test_runtime_program import emit
from yaml import safe_load

from autoplan.launch_scripts import LaunchGroup, mixed_torchrun_script, slurm_script, torchrun_script, train_job
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
    words = words_of_torchrun(tmp_path, script, CHECKPOINT_DIR=HOSTILE)
    restarts = ["--max-restarts", "3"]
    assert words == [
        "--standalone", "--nproc-per-node", "2", *restarts, "train.py", "--checkpoint-dir", HOSTILE, "--steps", "7",
    ]  # fmt: skip
    assert not list(tmp_path.rglob("pwned"))
    words = words_of_torchrun(tmp_path, script, CHECKPOINT_DIR="ck", MAX_RESTARTS="9")
    assert words[words.index("--max-restarts") + 1] == "9"


def test_without_a_folder_for_checkpoints_nothing_is_restarted(tmp_path):
    words = words_of_torchrun(tmp_path, torchrun_script(n_hosts=2, n_devices_per_host=2), MASTER_ADDR="host")
    assert "--checkpoint-dir" not in words
    assert words[words.index("--max-restarts") + 1] == "0"


def test_hosts_of_several_kinds_get_the_same_options(tmp_path):
    script = mixed_torchrun_script([LaunchGroup("a", 1, 8), LaunchGroup("b", 1, 4)])
    given = {"CHECKPOINT_DIR": HOSTILE, "MASTER_ADDR": "host", "NODE_RANK": "1"}
    words = words_of_torchrun(tmp_path, script, **given)
    assert words[words.index("--nproc-per-node") + 1] == "4"
    assert words[-4:] == ["--checkpoint-dir", HOSTILE, "--steps", "7"]


def test_slurm_tells_the_programs_to_stop_before_the_time_limit_and_queues_the_job_again(tmp_path):
    (tmp_path / "job.sbatch").write_text(slurm_script("job", n_hosts=2, n_devices_per_host=8))
    subprocess.run(["bash", "-n", str(tmp_path / "job.sbatch")], check=True)
    stub(tmp_path / "bin", "scontrol", '#!/bin/sh\necho "$@" >> "$LOG"\n')
    # stands for srun, which hands SIGTERM on: the program saves, and ends with 143
    stub(
        tmp_path / "bin",
        "srun",
        "#!/usr/bin/env bash\ntrap 'echo saved >> \"$LOG\"; exit 143' TERM\n"
        'echo started "${@: -4}" >> "$LOG"\nwhile :; do sleep 0.05; done\n',
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
        "show hostnames a,b", "started --checkpoint-dir ck --steps 9", "saved", "requeue 77",
    ]  # fmt: skip


def test_train_job_saves_to_a_volume_and_restarts():
    text = train_job(HOSTILE, n_hosts=2, n_devices_per_host=8)
    assert 'command: ["torchrun", "train.py", "--checkpoint-dir", "/checkpoints"]' in text
    spec = safe_load(text)["spec"]
    assert {"name": "PET_MAX_RESTARTS", "value": "3"} in spec["trainer"]["env"]
    (override,) = spec["podTemplateOverrides"]
    assert override["targetJobs"] == [{"name": "node"}]
    (mount,) = override["spec"]["containers"][0]["volumeMounts"]
    (volume,) = override["spec"]["volumes"]
    assert mount == {"name": volume["name"], "mountPath": "/checkpoints"}
    assert json.dumps(volume["persistentVolumeClaim"]) == '{"claimName": "REPLACE-WITH-YOUR-VOLUME-CLAIM"}'


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
    variables = {"MASTER_ADDR": next(iter(ADDRESSES)), "CHECKPOINT_DIR": "saved", "OMP_NUM_THREADS": "1"}
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
    assert "resumed from saved/step-00000002" in done[0][1] + done[1][1]
    lines = re.findall(r"step +(\d+)  loss ([\d.]+)", done[0][0] + done[1][0])
    found = {int(step): float(loss) for step, loss in lines}
    cpu = torch.device("cpu")
    plain = PlainTraining(Config(**config), tiny_gpt, build_device=cpu, device=cpu, learning_rate=1e-2)
    for step in range(6):
        batch = global_batch(tiny_gpt.make_batch, batch_size=2, seed=0, step=step)
        assert abs(found[step] - plain.step(batch)) < 1e-6
