"""Training programs as a good engineer writes them by hand: DDP, FSDP2 and `parallelize_module`, in plain PyTorch.

    replicate   fully_shard over groups of one: bf16 copies of the parameters, one all-reduce in float32
    ddp         DistributedDataParallel under autocast
    zero1       fully_shard, parameters gathered once per step, gradients reduced in the last micro-batch
    zero2       the same, gradients reduced in every micro-batch
    zero3       the same, parameters freed after every forward and backward pass of a block
    tp2, tp4    parallelize_module over two or four ranks, data parallel as zero1 over groups of them

All of them train the same model from the same seed on the same batches with fused AdamW.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from types import ModuleType

import torch
import torch.distributed as dist
from hand_tuned_space import TENSOR_PARALLEL_DEGREES, Case, Configuration
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

LEARNING_RATE = 3e-4
N_VARIANTS_OF_BLOCK = 4  # that torch.compile may make of each block


@dataclass(frozen=True)
class Sharding:
    """What `fully_shard` does: which state is divided, and when parameters are freed and gradients reduced."""

    is_divided: bool = True
    frees_parameters: bool = False
    reduces_each_micro_batch: bool = False


FULLY_SHARDED = {
    "replicate": Sharding(is_divided=False),
    "zero1": Sharding(),
    "zero2": Sharding(reduces_each_micro_batch=True),
    "zero3": Sharding(reduces_each_micro_batch=True, frees_parameters=True),
    **dict.fromkeys(TENSOR_PARALLEL_DEGREES, Sharding()),
}


class Program:
    """One configuration of one model on this rank; `step` is one optimizer step."""

    def __init__(
        self, case: Case, model_file: ModuleType, configuration: Configuration, *, device: torch.device, precision: str
    ) -> None:
        self.configuration, self.device = configuration, device
        self.tp_degree = TENSOR_PARALLEL_DEGREES.get(configuration.strategy, 1)
        self.mesh = mesh_of(device.type, dist.get_world_size() // self.tp_degree, self.tp_degree)
        self.dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
        torch.manual_seed(0)
        with device:
            model = model_file.build_model(**case.overrides).to(device).train()
        blocks = {name: m for name, m in model.named_modules() if type(m).__name__ == case.block}
        if not blocks:
            raise ValueError(f"{case.name}: no module of class {case.block}; name another in the column `block`")
        is_loss_parallel = self.tp_degree > 1 and case.tensor_parallel == "llama"
        self._around_loss = loss_parallel if is_loss_parallel else contextlib.nullcontext
        self._loss = functools.partial(float32_loss, model_file.loss_fn)
        if self.tp_degree > 1:
            TENSOR_PARALLEL[case.tensor_parallel](model, list(blocks.values()), self.mesh["tp"])
        if configuration.compile and not configuration.whole:
            compile_blocks(list(blocks.values()))
        if configuration.compile_loss:
            self._loss = torch.compile(self._loss, dynamic=False)
        if configuration.recompute:
            for block in blocks.values():
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        is_ddp = configuration.strategy == "ddp"
        self.model = self._distributed(model) if is_ddp else self._fully_sharded(model, list(blocks.values()))
        self.optimizer = self._build_optimizer()
        self.forward = torch.compile(self.model, dynamic=False) if configuration.whole else self.model

    def _distributed(self, model: nn.Module) -> nn.Module:
        if self.configuration.channels_last:
            model = model.to(memory_format=torch.channels_last)
        devices = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True, broadcast_buffers=False)

    def _fully_sharded(self, model: nn.Module, blocks: list[nn.Module]) -> nn.Module:
        sharding, mesh = FULLY_SHARDED[self.configuration.strategy], self.mesh["dp"]
        policy = MixedPrecisionPolicy()
        if self.dtype != torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
            for buffer_of, name, buffer in floating_buffers(model):
                buffer_of._buffers[name] = buffer.to(self.dtype)
        if not sharding.is_divided:
            mesh = mesh_of(self.device.type, mesh.size(), 1)  # replicas, and groups of one to shard over
        shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy)
        for block in blocks:
            shard(block, reshard_after_forward=sharding.frees_parameters)
        return shard(model, reshard_after_forward=None if sharding.frees_parameters else False)

    def _build_optimizer(self) -> torch.optim.Optimizer:
        """Fused AdamW; parameters on different meshes cannot share a kernel."""
        groups: dict[object, list[nn.Parameter]] = {}
        for parameter in self.model.parameters():
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=LEARNING_RATE, fused=True)

    def own_samples(self, batch: object) -> object:
        """Those of a global batch that this rank's data-parallel rank trains on."""
        rank, degree = self.mesh.get_local_rank("dp"), self.mesh["dp"].size()
        return map_tensors(lambda tensor: tensor.chunk(degree)[rank], batch)

    def step(self, batch: object) -> torch.Tensor:
        """One optimizer step on this rank's samples, which are in pinned memory; their mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        size = self.configuration.micro_batch
        n_micro_batches = next(tensors_of(batch)).shape[0] // size
        total = torch.zeros((), device=self.device)
        for i in range(n_micro_batches):
            part = map_tensors(functools.partial(self._to_device, start=i * size), batch)
            with self._gradients_of(is_last=i == n_micro_batches - 1):
                total += self._pass(part, n_micro_batches)
        if self.configuration.gradient_norm:
            self._check_gradients()
        self.optimizer.step()
        return total

    def _check_gradients(self) -> None:
        """Raises: FloatingPointError when the norm of all gradients, which training loops write down, is not finite."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not math.isfinite(norm.item()):
            raise FloatingPointError(f"the norm of the gradients is {norm.item()}")

    def _pass(self, micro_batch: tuple, n_micro_batches: int) -> torch.Tensor:
        """Forward and backward; this micro-batch's share of the loss."""
        inputs, targets = micro_batch
        is_autocast = self.configuration.strategy == "ddp" and self.dtype != torch.float32
        with self._around_loss():
            with torch.autocast(self.device.type, self.dtype, enabled=is_autocast):
                outputs = self.forward(**inputs) if isinstance(inputs, dict) else self.forward(inputs)
                loss = self._loss(logits_of(outputs), targets) / n_micro_batches
            loss.backward()
        loss = loss.detach()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    def _to_device(self, tensor: torch.Tensor, *, start: int) -> torch.Tensor:
        part = tensor[start : start + self.configuration.micro_batch].to(self.device, non_blocking=True)
        is_image = self.configuration.channels_last and part.dim() == 4
        return part.contiguous(memory_format=torch.channels_last) if is_image else part

    @contextlib.contextmanager
    def _gradients_of(self, *, is_last: bool) -> Iterator[None]:
        """Reduce the gradients of this micro-batch, or only add them up."""
        if self.configuration.strategy == "ddp":
            with contextlib.nullcontext() if is_last else self.model.no_sync():
                yield
            return
        sharding = FULLY_SHARDED[self.configuration.strategy]
        self.model.set_is_last_backward(is_last)
        self.model.set_requires_gradient_sync(sharding.reduces_each_micro_batch or is_last)
        self.model.set_reshard_after_backward(sharding.frees_parameters or is_last)
        yield


@functools.cache
def mesh_of(device_type: str, *sizes: int) -> DeviceMesh:
    """Made once in a process: each new one would open connections of its own, which take memory."""
    return init_device_mesh(device_type, sizes, mesh_dim_names=("dp", "tp"))


def compile_blocks(blocks: list[nn.Module]) -> None:
    from torch._dynamo import config

    config.recompile_limit = config.accumulated_recompile_limit = N_VARIANTS_OF_BLOCK * len(blocks)
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=False)


# ------------------------------------------------------------------------------------------------ tensor parallel


def parallelize_llama(model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh) -> None:
    """Columns and rows with a split sequence between them; logits and loss split over the vocabulary."""
    parallelize_module(
        model,
        mesh,
        {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    # A compiled block gave the embedding no gradient where its input was still being gathered (torch 2.13, CPU).
    model.tokens.register_forward_hook(lambda module, inputs, output: output.clone())
    whole_input = PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    whole_output = PrepareModuleOutput(
        output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False
    )
    rows = RowwiseParallel(output_layouts=Shard(1))
    columns = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "gate", "up")}
    norms = {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    for block in blocks:
        parallelize_module(block, mesh, norms | columns | {"attention.out": rows, "down": rows})
        parallelize_module(block, mesh, {"attention": whole_input, "ffn_norm": whole_output})
        block.attention.n_heads //= mesh.size()
        block.attention.n_kv_heads //= mesh.size()


# Linear layers of an encoder's block, by their names in BERT and ViT: the last pattern that fits counts.
ENCODER_LAYERS: dict[str, Callable[[], ParallelStyle]] = {
    "*attention.*query": ColwiseParallel,
    "*attention.*key": ColwiseParallel,
    "*attention.*value": ColwiseParallel,
    "*attention.[qkv]_proj": ColwiseParallel,
    "*attention.o_proj": RowwiseParallel,
    "*intermediate.dense": ColwiseParallel,
    "*output.dense": RowwiseParallel,
    "*mlp.fc1": ColwiseParallel,
    "*mlp.fc2": RowwiseParallel,
}


def parallelize_encoder(model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh) -> None:
    """Columns and rows inside of the blocks."""
    for block in blocks:
        linears = [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]
        styles = {n: style() for n in linears for pattern, style in ENCODER_LAYERS.items() if fnmatch(n, pattern)}
        if set(styles) != set(linears):
            raise ValueError(f"no style for {sorted(set(linears) - set(styles))}; add their names to ENCODER_LAYERS")
        parallelize_module(block, mesh, styles)


# Not here: GPT-2 (its fused projections are no `nn.Linear`, its 25 heads are odd), T5 (a bias of all heads is added to
# those of a rank) and the mixture (fused projections, grouped products), which no style fits.
TENSOR_PARALLEL = {"llama": parallelize_llama, "encoder": parallelize_encoder}


# --------------------------------------------------------------------------------------------------------- tensors


@dataclass(frozen=True)
class Outputs:
    """What loss functions read of a Hugging Face model's outputs."""

    logits: torch.Tensor


def logits_of(outputs: object) -> tuple[torch.Tensor, bool]:
    """The logits, and whether the loss function reads them from an attribute."""
    return (outputs, False) if isinstance(outputs, torch.Tensor) else (outputs.logits, True)


def float32_loss(loss_fn: Callable, logits: tuple[torch.Tensor, bool], targets: torch.Tensor) -> torch.Tensor:
    tensor, is_attribute = logits
    return loss_fn(Outputs(tensor.float()) if is_attribute else tensor.float(), targets)


def floating_buffers(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    found = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    return [item for item in found if item[2] is not None and item[2].is_floating_point()]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: object) -> object:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: map_tensors(function, item) for name, item in value.items()}
    return tuple(map_tensors(function, item) for item in value)


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(item)


def is_out_of_memory(error: BaseException) -> bool:
    """Also where NCCL, cuBLAS or the CPU's allocator say it in a message."""
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)
