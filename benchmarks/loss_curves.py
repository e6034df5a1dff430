"""Loss curves in bf16: the same training run under several plans must follow the curve of one process.

    python benchmarks/loss_curves.py emit FOLDER                 plans each case (needs autoplan)
    python benchmarks/loss_curves.py run FOLDER RESULTS.jsonl    trains (needs torch and the devices only)
    python benchmarks/loss_curves.py table RESULTS.jsonl         prints the table

Llama-1B learns the bytes of Python's standard library, from the same weights, on the same global batches. Rounding
makes two curves differ even in one process: "1 GPU, other micro-batch" shows by how much.
"""

import json
import subprocess
import sys
from pathlib import Path

N_STEPS, GLOBAL_BATCH = 40, 8
REFERENCE = "1 GPU"
# name: (devices, --fix)
CASES = {
    REFERENCE: (1, "dp=1,tp=1,pp=1,zero=0,micro_batch=4,recompute=none"),
    "1 GPU, other micro-batch": (1, "dp=1,tp=1,pp=1,zero=0,micro_batch=2,recompute=none"),
    "dp 2, ZeRO 3": (2, "dp=2,tp=1,pp=1,zero=3,micro_batch=4,recompute=none"),
    "tp 2": (2, "dp=1,tp=2,pp=1,zero=0,micro_batch=4,recompute=none"),
    "tp 2, compiled": (2, "dp=1,tp=2,pp=1,zero=0,micro_batch=4,recompute=none"),
    "tp 2, recompute": (2, "dp=1,tp=2,pp=1,zero=0,micro_batch=4,recompute=full"),
    "pp 2": (2, "dp=1,tp=1,pp=2,zero=0,micro_batch=2,recompute=none,schedule=1f1b"),
    "tp 4": (4, "dp=1,tp=4,pp=1,zero=0,micro_batch=4,recompute=none"),
    "pp 4": (4, "dp=1,tp=1,pp=4,zero=0,micro_batch=2,recompute=none,schedule=1f1b"),
    "tp 2, pp 2": (4, "dp=1,tp=2,pp=2,zero=0,micro_batch=2,recompute=none,schedule=1f1b"),
    "tp 2, dp 2, ZeRO 3": (4, "dp=2,tp=2,pp=1,zero=3,micro_batch=4,recompute=none"),
    "pp 2, dp 2, ZeRO 2": (4, "dp=2,tp=1,pp=2,zero=2,micro_batch=2,recompute=none,schedule=1f1b"),
}
ROOT = Path(__file__).parent.parent
HARDWARE = ROOT / "hardware_profiles" / "h200_x4.toml"
DATASET = '''

def build_dataset() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The bytes of the standard library, in sequences."""
    import sysconfig
    from pathlib import Path

    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:80])
    sequence = make_batch(1)[0].shape[1]
    tokens = torch.tensor(list(text), dtype=torch.int64)
    n_sequences = (len(tokens) - 1) // sequence
    starts = range(0, n_sequences * sequence, sequence)
    return [(tokens[i : i + sequence], tokens[i + 1 : i + sequence + 1]) for i in starts]
'''


def emit(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "llama_on_text.py"
    model.write_text((ROOT / "examples" / "llama.py").read_text() + DATASET)
    for name, (n_devices, fix) in CASES.items():
        hardware = folder / f"h200_x{n_devices}.toml"
        hardware.write_text(hardware_text(n_devices))
        command = [
            sys.executable, "-m", "autoplan", "plan", str(model), "--hw", str(hardware),
            "--set", "size=1b", "--global-batch", str(GLOBAL_BATCH), "--fix", fix,
            "--out", str(folder / file_name(name)), "--force", "--top", "1",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "compiled" in name:
            script = folder / file_name(name) / "train.py"
            script.write_text(script.read_text().replace("compile=False", "compile=True"))
        print(f"{name}: {'ok' if done.returncode == 0 else done.stderr.strip()[-300:]}", flush=True)


def hardware_text(n_devices: int) -> str:
    """The profile of the machine, with at most 4 of its devices."""
    text = HARDWARE.read_text()
    if n_devices < 4:
        text = text.partition("[host_link.all_reduce_bus_rate_of_group]")[0]
    return text.replace("n_devices = 4", f"n_devices = {n_devices}")


def file_name(case: str) -> str:
    """Of the folder of a case."""
    return case.replace(",", "").replace(" ", "_")


def run(folder: Path, results: Path) -> None:
    import torch

    with results.open("w") as file:
        for name, (n_devices, fix) in CASES.items():
            if n_devices > torch.cuda.device_count():
                continue
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_devices),
                "train.py", "--steps", str(N_STEPS), "--clip", "1.0", "--out-json", "measured.json",
            ]  # fmt: skip
            path = folder / file_name(name)
            done = subprocess.run(command, cwd=path, capture_output=True, text=True, timeout=300, check=False)
            row = {"case": name, "fix": fix, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
            if done.returncode == 0:
                steps = json.loads((path / "measured.json").read_text())["steps"]
                row["losses"] = [step["loss"] for step in steps]
                row["grad_norms"] = [step["grad_norm"] for step in steps]
            else:
                row["error"] = done.stderr[-1500:]
            print(
                json.dumps({"case": name, "last_loss": row.get("losses", [None])[-1]}), row.get("error", ""), flush=True
            )
            file.write(json.dumps(row) + "\n")
            file.flush()


def table(results: Path) -> None:
    rows = {row["case"]: row for row in map(json.loads, results.read_text().splitlines())}
    reference = rows[REFERENCE]["losses"]
    print(f"{'plan':26} {'first loss':>10} {'last loss':>10} {'mean |difference|':>18} {'largest':>9}")
    for name, row in rows.items():
        if "losses" not in row:
            print(f"{name:26} failed")
            continue
        differences = [abs(a - b) for a, b in zip(row["losses"], reference, strict=True)]
        mean = sum(differences) / len(differences)
        print(f"{name:26} {row['losses'][0]:10.4f} {row['losses'][-1]:10.4f} {mean:18.4f} {max(differences):9.4f}")


if __name__ == "__main__":
    action, *paths = sys.argv[1:]
    {"emit": emit, "run": run, "table": table}[action](*map(Path, paths))
