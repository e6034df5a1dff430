"""Your own module in your own loop, on 1 to N processes: `autoplan.parallelize` plans for as many as are running.

Run it cell by cell, in an editor that knows `# %%`, or as a whole:

    python examples/in_your_own_loop.py
    torchrun --standalone --nproc-per-node 4 examples/in_your_own_loop.py
"""

# %% A module and its batches, as you have them. This one learns a + b modulo 31 from three of four pairs.
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import autoplan
from autoplan import runtime
from autoplan.runtime.checkpoints.weight_files import export_model, read_weights

MODULUS, WIDTH, GLOBAL_BATCH, N_STEPS = 31, 64, 128, 200


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Adder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Embedding(MODULUS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, MODULUS)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        x = self.numbers(pairs).sum(dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.1)


pairs = torch.cartesian_prod(torch.arange(MODULUS), torch.arange(MODULUS))
pairs = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))]
unseen, seen = pairs[: len(pairs) // 4], pairs[len(pairs) // 4 :]


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step, the same on every process."""
    drawn = torch.randint(len(seen), (GLOBAL_BATCH,), generator=torch.Generator().manual_seed(step))
    return seen[drawn], seen[drawn].sum(dim=1) % MODULUS


torch.manual_seed(0)
module = Adder()

# %% One call: it traces the module, plans, and gives this process its part of the work.
model = autoplan.parallelize(
    module,
    batch_of(0),
    hw="dgx_a100_x8",  # the machine that you have: `autoplan hw list`, or a file of your own
    loss_fn=F.cross_entropy,
    build_optimizer=build_optimizer,
    global_batch=GLOBAL_BATCH,
    precision="fp32",
    device_type="cuda" if torch.cuda.is_available() else "cpu",
)
config, is_first = model.config, model.mesh.rank == 0
if is_first:
    print(f"dp {config.dp}, tp {config.tp}, pp {config.pp}, ZeRO {config.zero_stage}")

# %% The loop is yours: data, schedule, printing, when to stop. A step takes this data-parallel rank's samples.
for step in range(N_STEPS):
    for group in model.optimizer.param_groups:
        group["lr"] = 2e-3 * min(1.0, 2 * (1 - step / N_STEPS))  # any schedule, or one of torch's
    batch = runtime.local_batch(batch_of(step), config=config, dp_rank=model.mesh.dp_rank)
    loss = model.step(batch).item()  # of the whole batch, on every process
    if is_first and (step + 1) % 50 == 0:
        print(f"step {step + 1}: loss {loss:.6f}, grad norm {model.grad_norm.item():.4f}")

# %% The weights come back whole, under the module's own names, whatever the plan did to them.
file = Path("adder.safetensors")
export_model(model, file)
if is_first:
    trained = Adder()
    trained.load_state_dict(read_weights(file))
    found = trained(unseen).argmax(dim=1)
    share = (found == unseen.sum(dim=1) % MODULUS).double().mean().item()
    print(f"{share:.1%} of the sums that it never saw are right")
runtime.stop_process_group()
