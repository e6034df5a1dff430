"""Launch scripts of an emitted program: torchrun, Slurm and a Kubernetes TrainJob, as text.

Names come from the user, so each format has its encoder: `shlex.quote` for shell, JSON strings for YAML.

Each passes on where the run saves itself and goes on from: CHECKPOINT_DIR in the shell, a volume in a TrainJob.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

RENDEZVOUS_PORT = 29500
TRAIN_JOB_IMAGE = "REPLACE-WITH-YOUR-IMAGE"
TRAIN_JOB_CLAIM = "REPLACE-WITH-YOUR-VOLUME-CLAIM"
TRAIN_JOB_FOLDER = "/checkpoints"
MAX_RESTARTS = 3
MAX_NAME = 45  # Kubernetes makes NAME-node-0-HOST-xxxxx of it, of 63 characters at most
SAVING_S = 300  # what a program that is told to stop has to finish its step and save
# torch 2.13 gives restarted processes the store of those that died; without this, they look for the dead ones.
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # after which torchrun kills what it has told to stop; else 30 s
_CHECKPOINTS = (
    "# With CHECKPOINT_DIR set, a folder that all hosts see, the run is saved there, goes on from there when this is\n"
    "# started again, and is restarted MAX_RESTARTS times when a process fails.\n"
    'if [ -n "${CHECKPOINT_DIR:-}" ]; then\n'
    '    case "$CHECKPOINT_DIR" in /*) ;; *) CHECKPOINT_DIR="$PWD/$CHECKPOINT_DIR" ;; esac\n'
    '    set -- --checkpoint-dir "$CHECKPOINT_DIR" "$@"\n'
    f'    MAX_RESTARTS="${{MAX_RESTARTS:-{MAX_RESTARTS}}}"\n'
    "fi\n"
    f"export {_OWN_STORE}=1 {_SHUTDOWN_TIMEOUT}={SAVING_S}\n"
)
_TO_PROGRAM = (
    "command -v torchrun > /dev/null || {\n"
    '    echo "torchrun: not found; activate the Python environment that has torch, and start this again" >&2\n'
    "    exit 127\n"
    "}\n"
    '# Paths among the arguments are taken from the folder of train.py.\ncd "$(dirname "${BASH_SOURCE[0]}")/.."\n'
)
_RESTARTS = '--max-restarts "${MAX_RESTARTS:-0}"'


class LaunchGroup(NamedTuple):
    """Equal hosts that a plan starts, with as many processes on each as it uses devices."""

    hardware: str
    n_hosts: int
    n_devices_per_host: int


def launch_line(*, n_hosts: int, n_devices_per_host: int) -> str:
    """The command that starts the program; on several hosts, to be run once on each."""
    if n_hosts == 1:
        return f"torchrun --standalone --nproc-per-node {n_devices_per_host} train.py"
    return (
        f"torchrun --nnodes {n_hosts} --nproc-per-node {n_devices_per_host} "
        f'--rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:{RENDEZVOUS_PORT}" train.py'
    )


def launch_files(job: str, *, n_hosts: int, n_devices_per_host: int) -> tuple[tuple[str, str], ...]:
    """(path in the output folder, text) of every launch script; `job` names the job."""
    sizes = {"n_hosts": n_hosts, "n_devices_per_host": n_devices_per_host}
    return (
        ("launch/torchrun.sh", torchrun_script(**sizes)),
        ("launch/job.sbatch", slurm_script(job, **sizes)),
        ("launch/trainjob.yaml", train_job(job, **sizes)),
    )


def mixed_launch_line(groups: Sequence[LaunchGroup]) -> str:
    """The command for a plan on several groups of hosts, to be run once on each of them, numbered group by group.

    Ranks follow the numbers of the hosts, since the numbers are given and not found out by the launcher.
    """
    return (
        f'torchrun --nnodes {sum(group.n_hosts for group in groups)} --node-rank "$NODE_RANK" '
        f'--nproc-per-node "$N_PROCESSES" --master-addr "$MASTER_ADDR" --master-port {RENDEZVOUS_PORT} train.py'
    )


def mixed_launch_files(groups: Sequence[LaunchGroup]) -> tuple[tuple[str, str], ...]:
    """Likewise (path, text); torchrun alone, as one Slurm or Kubernetes job has hosts of one kind."""
    return (("launch/torchrun.sh", mixed_torchrun_script(groups)),)


def mixed_torchrun_script(groups: Sequence[LaunchGroup]) -> str:
    """Start the program with torchrun on hosts of several kinds; arguments are passed on to train.py."""
    listed, branches, first = "", "", 0
    for group in groups:
        last = first + group.n_hosts - 1
        numbers = str(first) if last == first else f"{first} to {last}"
        listed += f"#   {numbers}: {group.hardware}, {group.n_devices_per_host} processes each\n"
        branches += (
            f"{'elif' if first else 'if'} ((NODE_RANK <= {last})); then N_PROCESSES={group.n_devices_per_host}\n"
        )
        first = last + 1
    return (
        "#!/usr/bin/env bash\n"
        f"# Run this on each of the {first} hosts, with NODE_RANK set to the number of the host:\n"
        f"{listed}"
        "set -euo pipefail\n"
        ': "${MASTER_ADDR:?set it to the address of host 0, the same on every host}"\n'
        ': "${NODE_RANK:?set it to the number of this host, as listed above}"\n'
        f"{branches}"
        f'else echo "NODE_RANK is $NODE_RANK, there are {first} hosts" >&2; exit 2\n'
        "fi\n"
        f"{_CHECKPOINTS}"
        f"{_TO_PROGRAM}"
        f'exec {_with_restarts(mixed_launch_line(groups))} "$@"\n'
    )


def torchrun_script(*, n_hosts: int, n_devices_per_host: int) -> str:
    """Start the program with torchrun; arguments are passed on to train.py."""
    check = (
        "" if n_hosts == 1 else ': "${MASTER_ADDR:?set it to the address of the first host, the same on every host}"\n'
    )
    return (
        "#!/usr/bin/env bash\n"
        f"# Run this on {'the host' if n_hosts == 1 else f'each of the {n_hosts} hosts'}.\n"
        "set -euo pipefail\n"
        f"{check}"
        f"{_CHECKPOINTS}"
        f"{_TO_PROGRAM}"
        f'exec {_with_restarts(launch_line(n_hosts=n_hosts, n_devices_per_host=n_devices_per_host))} "$@"\n'
    )


def _with_restarts(launch: str) -> str:
    """A launch line whose processes are restarted when one fails."""
    return launch.removesuffix("train.py") + f"{_RESTARTS} train.py"


def slurm_script(job: str, *, n_hosts: int, n_devices_per_host: int) -> str:
    """One torchrun agent per host under Slurm; submit it from the output folder.

    Before the time limit Slurm signals the script, which tells the programs to stop and puts the job back into the
    queue; a job that is preempted is told by Slurm itself.
    """
    agent = _with_restarts(
        f"torchrun --nnodes {n_hosts} --nproc-per-node {n_devices_per_host} "
        f'--rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:{RENDEZVOUS_PORT}" train.py'
    )
    return (
        "#!/usr/bin/env bash\n"
        f"#SBATCH --job-name={shlex.quote(resource_name(job))}\n"
        f"#SBATCH --nodes={n_hosts}\n"
        "#SBATCH --ntasks-per-node=1\n"
        f"#SBATCH --gpus-per-node={n_devices_per_host}\n"
        "#SBATCH --exclusive\n"
        "#SBATCH --requeue\n"
        "#SBATCH --open-mode=append\n"
        f"#SBATCH --signal=B:USR1@{SAVING_S}\n"
        "# Submit from the folder that holds train.py: sbatch launch/job.sbatch\n"
        "set -euo pipefail\n"
        'cd "$SLURM_SUBMIT_DIR"\n'
        'MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"\n'
        "export MASTER_ADDR\n"
        f"{_CHECKPOINTS}"
        "stop_and_requeue() {\n"
        "    # every program finishes its step and saves; srun itself would kill them when told to stop\n"
        '    scancel --signal=TERM "$SLURM_JOB_ID"\n'
        '    wait "$agents" || true\n'
        '    scontrol requeue "$SLURM_JOB_ID"\n'
        "}\n"
        'if [ -n "${CHECKPOINT_DIR:-}" ]; then trap stop_and_requeue USR1; fi\n'
        f'srun {agent} "$@" &\n'
        "agents=$!\n"
        'wait "$agents"\n'
    )


def train_job(job: str, *, n_hosts: int, n_devices_per_host: int) -> str:
    """A TrainJob (trainer.kubeflow.org/v1alpha1) over the `torch-distributed` runtime of Kubeflow Trainer 2.3 or later.

    The program must be in the image, at the working directory; the names of the image and of the volume for checkpoints
    are left for the user to fill in. Trainer 2.2 has no `terminationGracePeriodSeconds` among `runtimePatches`.
    """
    text = json.dumps
    return (
        "# Put the output folder into an image; name it below, and a volume claim that all hosts can write, where the\n"
        "# run saves itself and goes on from; then: kubectl apply -f launch/trainjob.yaml\n"
        "# Needs Kubeflow Trainer 2.3 or later.\n"
        "apiVersion: trainer.kubeflow.org/v1alpha1\n"
        "kind: TrainJob\n"
        "metadata:\n"
        f"  name: {text(resource_name(job))}\n"
        "spec:\n"
        "  runtimeRef:\n"
        "    name: torch-distributed\n"
        "  trainer:\n"
        f"    image: {text(TRAIN_JOB_IMAGE)}\n"
        f'    command: ["torchrun", "train.py", "--checkpoint-dir", {text(TRAIN_JOB_FOLDER)}]\n'
        "    env:\n"
        f"      - {{name: PET_MAX_RESTARTS, value: {text(str(MAX_RESTARTS))}}}\n"
        f'      - {{name: {_OWN_STORE}, value: "1"}}\n'
        f"      - {{name: {_SHUTDOWN_TIMEOUT}, value: {text(str(SAVING_S))}}}\n"
        f"    numNodes: {n_hosts}\n"
        f"    numProcPerNode: {n_devices_per_host}\n"
        "    resourcesPerNode:\n"
        "      limits:\n"
        f"        nvidia.com/gpu: {n_devices_per_host}\n"
        "  runtimePatches:\n"
        "    - manager: autoplan\n"
        "      trainingRuntimeSpec:\n"
        "        template:\n"
        "          spec:\n"
        "            replicatedJobs:\n"
        "              - name: node\n"
        "                template:\n"
        "                  spec:\n"
        "                    template:\n"
        "                      spec:\n"
        f"                        terminationGracePeriodSeconds: {SAVING_S}\n"
        "                        containers:\n"
        "                          - name: node\n"
        "                            volumeMounts:\n"
        f"                              - {{name: checkpoints, mountPath: {text(TRAIN_JOB_FOLDER)}}}\n"
        "                              - {name: shared-memory, mountPath: /dev/shm}\n"
        "                        volumes:\n"
        "                          - name: checkpoints\n"
        "                            persistentVolumeClaim:\n"
        f"                              claimName: {text(TRAIN_JOB_CLAIM)}\n"
        "                          - name: shared-memory  # for NCCL and the workers of a dataset; 64 MiB without it\n"
        "                            emptyDir: {medium: Memory}\n"
    )


def resource_name(job: str) -> str:
    """The job's name as Kubernetes and Slurm accept it: lower case letters, digits and dashes."""
    name = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")[: MAX_NAME - len("autoplan-")].strip("-")
    return f"autoplan-{name}" if name else "autoplan"
