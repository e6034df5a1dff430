"""Where the time of one plain training step goes on this device: kernels by kind, and each module's peak memory.

    python benchmarks/kernels.py RESULTS.jsonl

Trains the example models in one process (bf16 parameters, forward and backward, no optimizer) and groups the kernels
that the torch profiler saw. Needs torch and one GPU only.
"""

import importlib.util
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

EXAMPLES = Path(__file__).parent.parent / "examples"
CASES = (
    ("llama", {"size": "1b"}, 1),
    ("llama", {"size": "1b"}, 2),
    ("gpt", {"size": "1.5b"}, 8),
    ("llama", {"size": "8b", "n_layers": 8}, 1),
)


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main(path):
    with open(path, "w") as file:
        for name, overrides, batch_size in CASES:
            row = measure(load(name), overrides, batch_size) | {
                "model": name,
                "overrides": overrides,
                "batch_size": batch_size,
            }
            file.write(json.dumps(row) + "\n")
            print(json.dumps(row)[:6000], flush=True)


def measure(module, overrides, batch_size):
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        model = module.build_model(**overrides).to(torch.bfloat16)
    inputs, targets = (t.cuda() for t in module.make_batch(batch_size))

    def step():
        module.loss_fn(model(inputs), targets).backward()
        model.zero_grad(set_to_none=True)

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - start) / 5
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    ops = defaultdict(lambda: [0, 0.0])
    for event in profiler.key_averages(group_by_input_shape=True):
        if event.self_device_time_total > 0 and event.key.startswith("aten::"):
            key = f"{event.key} {event.input_shapes}"
            ops[key][0] += event.count / 2
            ops[key][1] += event.self_device_time_total / 2e6
    rows = sorted(((k, n, s) for k, (n, s) in ops.items()), key=lambda r: -r[2])[:60]
    return {"step_s": step_s, "ops": rows, "device": torch.cuda.get_device_name(), "torch": torch.__version__}


if __name__ == "__main__":
    main(sys.argv[1])
