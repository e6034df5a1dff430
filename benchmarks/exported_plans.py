"""Three steps under exported plans in Accelerate and DeepSpeed, beside the program of each plan; two CPU processes.

    python benchmarks/exported_plans.py OUT [accelerate] [deepspeed]

plans a small `examples/gpt.py` into OUT. Both start from the weights that the program exports and take its batches.
They use SGD: the steps of AdamW hide a wrong scale of the gradients. Accelerate trains in float64, which DeepSpeed
without ZeRO refuses; it trains in float32. Accelerate has FSDP on accelerators only: it is told that the CPU is one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

N_STEPS = 3
SIZES = ("n_layers=2", "width=64", "n_heads=4", "context=64")
SGD = "\n\ndef build_optimizer(params):\n    return torch.optim.SGD(params, lr=0.1, momentum=0.9)\n"
PLANS = {
    "ddp": "zero=0,micro_batch=8,recompute=none",
    "ddp_accumulated": "zero=0,micro_batch=2,recompute=none",
    "zero1": "zero=1,micro_batch=8,recompute=none",
    "zero2": "zero=2,micro_batch=8,recompute=none",
    "zero2_accumulated": "zero=2,micro_batch=2,recompute=none",
    "zero3": "zero=3,micro_batch=8,recompute=none",
    "zero3_recomputed": "zero=3,micro_batch=8,recompute=full",
    "zero3_accumulated_recomputed": "zero=3,micro_batch=2,recompute=full",
}
DTYPES = {"accelerate": "float64", "deepspeed": "float32"}
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def compare(target: str, name: str, out: Path) -> str:
    plan = out / name
    if not plan.exists():
        _plan(name, out)
    program = [*TORCHRUN, str(plan / "train.py"), "--device", "cpu", "--dtype", DTYPES[target]]
    weights, log, losses = (out / f"{name}.{target}.{kind}" for kind in ("safetensors", "jsonl", "json"))
    log.unlink(missing_ok=True)
    _run([*program, "--steps", "0", "--export", str(weights)])
    _run([*program, "--steps", str(N_STEPS), "--log-jsonl", str(log)])
    accelerate_launch = ["accelerate.commands.launch", "--config_file", str(plan / "interop" / "accelerate.yaml")]
    launch = accelerate_launch if target == "accelerate" else TORCHRUN
    _run([*launch, __file__, "train", target, str(plan), str(weights), str(losses)])
    ours = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    theirs = json.loads(losses.read_text())
    largest = max(abs(their - our) / our for their, our in zip(theirs, ours, strict=True))
    return f"{target} {name}: losses {theirs}, of the program {ours}, largest relative difference {largest:.1e}"


def _plan(name: str, out: Path) -> None:
    model = out / "gpt.py"
    model.write_text((Path(__file__).parents[1] / "examples" / "gpt.py").read_text() + SGD)
    sizes = [part for size in SIZES for part in ("--set", size)]
    fixed = f"dp=2,tp=1,pp=1,compile=off,cuda_graph=off,{PLANS[name]}"
    request = ["--hw", "dgx_a100_x8/2", "--global-batch", "16", "--precision", "fp32", "--fix", fixed]
    exports = ["--out", str(out / name), "--emit", "accelerate", "--emit", "deepspeed"]
    _run(["autoplan", "plan", str(model), *sizes, *request, *exports])


def _run(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")


def train(target: str, plan: Path, weights: Path, losses: Path) -> None:
    sys.path.insert(0, str(plan))
    import model as model_file
    import train as program
    from runtime.input_pipeline.batches import global_batch
    from safetensors.torch import load_file

    size, n_micro_batches = program.PLAN.micro_batch_size, program.PLAN.n_micro_batches
    model = model_file.build_model(**program.MODEL_OVERRIDES)
    model.load_state_dict(load_file(weights), strict=False)
    model.to(getattr(torch, DTYPES[target]))
    # batches of all micro-batches in turn, within each those of the ranks
    order = torch.arange(2 * n_micro_batches * size).view(2, n_micro_batches, size).transpose(0, 1).flatten()
    samples = []
    for step in range(N_STEPS):
        inputs, targets = global_batch(model_file.make_batch, batch_size=len(order), seed=0, step=step)
        samples += [(inputs[index], targets[index]) for index in order]
    loader = torch.utils.data.DataLoader(samples, batch_size=size)
    steps = {"accelerate": train_with_accelerate, "deepspeed": train_with_deepspeed}[target]
    found = steps(model, model_file, loader, plan, n_micro_batches)
    means = [sum(found[i : i + n_micro_batches]) / n_micro_batches for i in range(0, len(found), n_micro_batches)]
    if os.environ["RANK"] == "0":
        losses.write_text(json.dumps(means))
    torch.distributed.barrier()
    os._exit(0)  # threads of gloo may hang or abort a process that tidies up


def train_with_accelerate(model, model_file, loader, plan, n_micro_batches):
    from accelerate import Accelerator, DistributedType, PartialState

    shards = "ACCELERATE_USE_FSDP" in os.environ
    if shards:
        PartialState._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_GPU)
        PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    accelerator = Accelerator(cpu=not shards, gradient_accumulation_steps=n_micro_batches)
    optimizer = model_file.build_optimizer(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = model_file.loss_fn(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(accelerator.reduce(loss.detach(), "mean").item())
    return found


def train_with_deepspeed(model, model_file, loader, plan, n_micro_batches):
    import deepspeed

    deepspeed.init_distributed("gloo")
    config = json.loads((plan / "interop" / "deepspeed.json").read_text()) | {"zero_allow_untested_optimizer": True}
    optimizer = model_file.build_optimizer(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    found = []
    for number, (inputs, targets) in enumerate(loader):
        if number % 2 == torch.distributed.get_rank():
            loss = model_file.loss_fn(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            found.append(mean.item() / 2)
    return found


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(sys.argv[2], *map(Path, sys.argv[3:]))
    else:
        folder = Path(sys.argv[1])
        folder.mkdir(exist_ok=True)
        for target in sys.argv[2:] or DTYPES:
            for plan in PLANS:
                print(compare(target, plan, folder), flush=True)
