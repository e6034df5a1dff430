"""ParallelModel: the user's model under a plan, from construction to one optimizer step.

In which order parallelism is applied to a stage says `stage_order`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .alone import host_backend, is_alone
from .building.construction import build_whole_model, construction_device, local_stages, one_process_at_a_time
from .building.weights import Shard, join_shards
from .config import Config
from .float32_products import set_float32_products
from .input_pipeline.batches import (
    Batch,
    flatten_tensors,
    for_users_code,
    map_tensors,
    micro_batches,
    tensors_at,
    tensors_in_place,
)
from .input_pipeline.model_calls import call_model, loss_function
from .input_pipeline.rehearsal import Rehearsal
from .input_pipeline.same_batch import check_same_batch
from .mesh import RankMesh
from .process_group import failing_after_others
from .seeds import training_seed
from .stages.chunked_loss import whole_logits
from .stages.compiled import compiled, naming_a_way_without
from .stages.cuda_graph import StepGraph
from .stages.grad_compression import PowerSGD
from .stages.gradient_memory import keep_gradients_on
from .stages.pieces import WholeTensors, whole_tensors
from .stages.pipeline import Pipeline
from .stages.recompute import unchanged_buffers
from .stages.stage_order import apply_in_order
from .stages.unused import UnusedParameters
from .stages.zero import (
    finish_weights,
    freeing_blocks,
    prepare_backward,
    sharded_modules,
    whole,
)
from .step_profile import OPTIMIZER_MARK
from .tensor_parallel.collectives import all_gather, all_reduce
from .tensor_parallel.experts import use_float64_grouped_products
from .update.finite import finite_update
from .update.gradients import (
    clip_gradients,
    handed_over,
    scale_gradients,
    squared_norm_share,
    sum_partial_gradients,
    sum_tied_gradients,
)
from .update.learning_rate import LearningRate, build_scheduler_of, load_scheduler, step_scheduler
from .update.loss_average import total_count, weigh
from .update.loss_scale import LossScale
from .update.named_parameters import name_parameters
from .update.optimizer import LEARNING_RATE, build_optimizer_of, naming_distributed_tensors
from .update.replicas import equalize_replicas


class ParallelModel(nn.Module):
    """A rank's part of a model under a plan; every rank of the mesh builds one.

    Args:
        model_file: has `build_model`, and `loss_fn` unless the model returns its loss; optionally `build_optimizer`.
        parallel_model: the generated stages; None when the model is made of its own classes.
        overrides: keyword arguments for `build_model`.
        max_grad_norm: clip gradients to this global norm; None does not clip.
        learning_rates: how the learning rate changes from step to step; None keeps it, whatever the model file says.

    Attributes:
        stages: the pipeline stages on this rank.
        scheduler: of the learning rate; None where it does not change.
        loss_scale: under fp16, else None.
        grad_norm: global norm of the gradients of the last step, before clipping.
        was_updated: whether the last step changed the parameters; under fp16 it may not.
        full_build_device: where the whole model was built; the same device gives the same initial weights.
        whole: names and shapes of the user's tensors, as a checkpoint holds them.
        shards: how tensor parallelism divides parameters, by name.
        compressed: what compressed reductions of each stage remember.
        rehearsal: tries a batch without a step.
        n_steps: optimizer steps taken, in this run and those that it resumed.
        is_told_to_stop: set it on any rank, and `stops` is true on all of them after the next step.
        is_left_alone: whether nothing changes modules between steps but `evaluate`, so that a CUDA graph can be checked
            against them while the device is busy.
    """

    def __init__(
        self,
        config: Config,
        model_file: Any,
        parallel_model: Any | None = None,
        *,
        mesh: RankMesh,
        overrides: Mapping[str, Any] | None = None,
        seed: int = 0,
        learning_rate: float = LEARNING_RATE,
        max_grad_norm: float | None = None,
        learning_rates: LearningRate | None = None,
    ) -> None:
        super().__init__()
        if parallel_model is None and config.tp * config.n_stages > 1:
            raise ValueError("tensor and pipeline parallelism need the generated parallel_model")
        self.config, self.mesh = config, mesh
        set_float32_products(config.precision)
        if config.precision == "fp64" and mesh.device.type == "cpu":
            use_float64_grouped_products()
        self._parallel_model = parallel_model
        self.shards: dict[str, Shard] = {} if parallel_model is None else parallel_model.SHARDS
        self.whole, self.compressed = WholeTensors({}, {}), list[PowerSGD | None]()
        self.n_steps = 0
        self.is_told_to_stop, self._n_told = False, torch.zeros(())
        self.is_left_alone = False
        self._has_compared_batches = False
        self._copied = list[torch.cuda.Event]()
        self._max_grad_norm = max_grad_norm
        self._loss_fn = loss_function(model_file, parallel_model, mesh)
        build_model = functools.partial(model_file.build_model, **(overrides or {}))
        self.rehearsal = Rehearsal(model_file, build_model, is_generated=parallel_model is not None)

        self.full_build_device = construction_device(build_model, dtype=config.parameter_dtype, device=mesh.device)
        stages = self._build_stages(build_model, seed)
        if config.compile and not config.chunked_head:
            self._loss_fn = compiled(self._loss_fn, mesh.device)
        self.stages = nn.ModuleList(stages)
        self._parameters_of_rank, self._tied = name_parameters(stages, parallel_model, config=config, mesh=mesh)
        self.optimizer = build_optimizer_of(model_file, [p.updated for p in self._parameters_of_rank], learning_rate)
        self.scheduler = build_scheduler_of(model_file, self.optimizer, learning_rates)
        self._pipeline = self._build_pipeline() if config.pp > 1 else None

        self._unused = UnusedParameters(stages[0]) if config.is_module_level and config.dp > 1 else None
        self.loss_scale = LossScale() if config.precision == "fp16" else None
        self._sharded_modules = sharded_modules(self.stages)
        self._graph = self._step_graph() if config.runs_as_graph(mesh.device) else None
        if mesh.device.type == "cuda":
            stream = torch.cuda.current_stream(mesh.device) if self._graph is None else self._graph.stream
            keep_gradients_on(stream, self._sharded_modules, config=config)
        self.was_updated = True
        self._mean_divisor = config.mean_divisor(mesh.dp_rank)
        self._mean_count = torch.ones((), device=mesh.device)
        self.grad_norm = torch.zeros((), device=mesh.device)
        # Dropout draws differently on each data-parallel rank and stage, and alike on tensor-parallel ranks.
        torch.manual_seed(training_seed(seed, config=config, mesh=mesh))

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The model's outputs for this rank's inputs; without pipeline parallelism only.

        Synchronized BatchNorm in training mode needs all data-parallel ranks to call it.
        """
        if self._pipeline is not None:
            raise RuntimeError("a pipeline has no forward pass of its own; call step(batch)")
        if self._parallel_model is None:
            return whole_logits(self.stages[0](*inputs, **named_inputs))
        given: dict[Any, Any] = {**dict(enumerate(inputs)), **named_inputs}
        outputs = whole_logits(self.stages[0](*tensors_at(given, self._parallel_model.INPUTS)))
        pairs = zip(flatten_tensors(outputs), self._parallel_model.OUTPUTS, strict=True)
        whole_outputs = [self._whole_output(value, layout) for value, layout in pairs]
        return whole_outputs[0] if len(whole_outputs) == 1 else tuple(whole_outputs)

    def _whole_output(self, value: torch.Tensor, layout: Shard | str) -> torch.Tensor:
        if isinstance(layout, Shard):
            return all_gather(value, layout.dim, self.mesh.tp_group, layout.blocks, layout.padded_from)
        return all_reduce(value, self.mesh.tp_group) if layout == "partial" else value

    @failing_after_others()
    @naming_a_way_without()
    def step(self, batch: Batch) -> torch.Tensor:
        """One optimizer step on this data-parallel rank's samples; the mean loss of the global batch, on every rank.

        The loss of a step is the mean over samples of the losses of their micro-batches, or, with
        `config.ignored_target`, the mean over all targets of the global batch that count. Gradients stay readable until
        the next step. Under fp16 a step whose gradients overflow changes neither parameters nor the learning rate.

        Raises: ValueError, in the first step, where ranks that share samples were given different batches.
        """
        batch = tensors_in_place(batch)
        if not self._has_compared_batches:
            check_same_batch(batch, config=self.config, mesh=self.mesh)
            self._has_compared_batches = True
        if self._graph is None:
            for entry in self._parameters_of_rank:
                entry.parameter.grad = None
        else:
            if not self.is_left_alone:
                self._graph.forget_seen()
            self._free_gathered_parameters()  # what a forward pass by itself gathered, a replay would take for its own
        passes = self._passes if self._graph is None else self._graph.run
        local_loss = passes(map_tensors(self._to_device, batch))
        with torch.profiler.record_function(OPTIMIZER_MARK):
            sum_partial_gradients(self._parameters_of_rank, self.mesh.tp_group)
            sum_tied_gradients(self._tied)
            sums, own = self._reduce_loss_and_norm(local_loss)
            loss = sums[0] / self._scale
            self.was_updated = self._unscale_gradients()
            if self.was_updated:
                if self._max_grad_norm is not None:
                    clip_gradients(self._parameters_of_rank, norm=self.grad_norm, max_norm=self._max_grad_norm)
                self.wait_for_copies()
                with self._checked(sums, own), handed_over(self._parameters_of_rank), naming_distributed_tensors():
                    self.optimizer.step()
                    if self.is_left_alone and self._graph is not None:
                        self._graph.look_ahead()
                equalize_replicas(self._parameters_of_rank, self.optimizer, self.mesh.tp_group, step=self.n_steps)
                if self.scheduler is not None:
                    step_scheduler(self.scheduler, loss)
        self.n_steps += 1
        return loss

    @property
    def stops(self) -> bool:
        """Whether a rank was told to stop before the last step ended; waits for the device."""
        return bool(self._n_told.item())

    def hold_update(self, copied: torch.cuda.Event | None) -> None:
        """Let the next update wait for `copied` too: until then parameters and optimizer state are being read."""
        if copied is not None:
            self._copied.append(copied)

    def wait_for_copies(self) -> None:
        """Let the device wait until nothing reads what an update changes."""
        for copied in self._copied:
            torch.cuda.current_stream(self.mesh.device).wait_event(copied)
        self._copied.clear()

    def run_state(self) -> dict[str, Any]:
        """Numbers of the run that a checkpoint holds; they must be JSON, those of a user's scheduler too."""
        return {
            "n_steps": self.n_steps,
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        }

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        """Go on from the numbers of `run_state`.

        A run in another precision has no loss scale, or a new one; one without a schedule before has a new one.
        """
        self.n_steps = int(state["n_steps"])
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])
        if self.scheduler is not None and state["scheduler"] is not None:
            load_scheduler(self.scheduler, state["scheduler"])

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group, for the coming step."""
        return float(self.optimizer.param_groups[0]["lr"])

    @failing_after_others()
    @naming_a_way_without()
    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss of a global batch in evaluation mode, and its weight in a mean over batches; on every rank.

        Like `step`, of which it is the forward half, it takes this data-parallel rank's samples. Batches weigh alike,
        or, with `config.ignored_target`, by how many of their targets count.
        """
        if self._graph is not None:
            self._graph.forget_seen()
        batches = self._micro_batches(tensors_in_place(batch))
        self._count_targets(batches)
        self.stages.eval()
        # A graph keeps the memory of the parameters that its own passes gather.
        gathers_less = freeing_blocks(self.stages, config=self.config) if self._graph is not None else nullcontext()
        with gathers_less, unchanged_buffers(self.stages):  # generated code counts batches whatever the mode
            if self._pipeline is not None:
                local_loss = self._pipeline.evaluate(batches)
            else:
                losses = [self._loss(self._outputs(inputs), targets) for inputs, targets in batches]
                local_loss = torch.stack(losses).sum() / self._mean_divisor
        self.stages.train()
        self._free_gathered_parameters()
        loss = self._share(local_loss)
        if self.config.n_ranks > 1:
            dist.all_reduce(loss)
        return loss / self._scale, self._mean_count

    def updated(self) -> dict[nn.Parameter, nn.Parameter]:
        """Of each trainable parameter of this rank what the optimizer has in its place; see `NamedParameter`."""
        return {entry.parameter: entry.updated for entry in self._parameters_of_rank}

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the user's model, whole tensor) of this rank's stages; all ranks must iterate together."""
        for entry in self._parameters_of_rank:
            yield entry.name, self._whole(entry.name, entry.parameter.detach())

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Like `full_parameters`, of gradients; zeros where a parameter has none."""
        for entry in self._parameters_of_rank:
            gradient = entry.parameter.grad
            yield (
                entry.name,
                self._whole(entry.name, torch.zeros_like(entry.parameter) if gradient is None else gradient),
            )

    def full_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Like `full_parameters`, of buffers such as running statistics; each data-parallel rank has its own."""
        for stage in self.stages:
            for name, buffer in stage.named_buffers():
                yield name, self._whole(name, buffer)

    # -------------------------------------------------------------- construction

    def _build_stages(self, build_model: Callable[[], nn.Module], seed: int) -> list[nn.Module]:
        """The stages of this rank, parallelism applied; sets `whole` and `compressed`."""
        config, mesh, generated = self.config, self.mesh, self._parallel_model
        device = self.full_build_device
        with one_process_at_a_time(device != mesh.device, mesh.device):
            full = build_whole_model(build_model, seed=seed, dtype=config.parameter_dtype, device=device)
            self.whole = whole_tensors(full)
            stages = local_stages(full, config=config, mesh=mesh, parallel_model=generated)
            del full  # only what this rank keeps stays in memory while parallelism is applied
            for stage in stages:
                blocks: Any = config.blocks if generated is None else stage.BLOCKS
                self.compressed.append(
                    apply_in_order(stage, blocks=blocks, is_generated=generated is not None, config=config, mesh=mesh)
                )
        return stages

    def _build_pipeline(self) -> Pipeline:
        assert self.mesh.pp_group is not None and self._parallel_model is not None
        return Pipeline(
            list(self.stages),
            config=self.config,
            boundaries=self._parallel_model.BOUNDARIES,
            pp_rank=self.mesh.pp_rank,
            group=self.mesh.pp_group,
            p2p_groups=self.mesh.p2p_groups,
            device=self.mesh.device,
            loss=self._loss,
            prepare_backward=self._prepare_backward,
            finish_weights=self._finish_weights,
        )

    def _step_graph(self) -> StepGraph:
        parameters = [(entry.name, entry.parameter) for entry in self._parameters_of_rank]
        group = dist.new_group(backend=host_backend()) if self.config.n_ranks > 1 else None
        return StepGraph(self.stages, self._passes, parameters=parameters, device=self.mesh.device, group=group)

    # -------------------------------------------------------------- one step

    def _free_gathered_parameters(self) -> None:
        """Give back what a forward pass without a backward pass has gathered."""
        for module in self._sharded_modules:
            module.reshard()

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.config.parameter_dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=self.mesh.device, dtype=dtype, non_blocking=True)

    def _passes(self, batch: Batch) -> torch.Tensor:
        """Forward and backward passes of a step; this rank's part of the loss."""
        batches = self._micro_batches(batch)
        self._count_targets(batches)
        return self._run_micro_batches(batches) if self._pipeline is None else self._run_pipeline(batches)

    def _micro_batches(self, batch: Batch) -> list[Batch]:
        """On the device; for generated stages the inputs are their arguments, in that order."""
        inputs, targets = map_tensors(self._to_device, batch)
        if self._parallel_model is not None:
            inputs = tensors_at(inputs, self._parallel_model.INPUTS)
        return micro_batches((inputs, targets), self.config, dp_rank=self.mesh.dp_rank)

    def _count_targets(self, batches: list[Batch]) -> None:
        """Learn how many targets count of a micro-batch as large as those of this rank, on average over all ranks."""
        if self.config.ignored_target is not None:
            total = total_count([targets for _, targets in batches], ignored=self.config.ignored_target)
            if self.config.n_ranks > 1:
                dist.all_reduce(total)  # ranks of one data-parallel rank have the same targets
            self._mean_count = total / (self.config.n_ranks * self._mean_divisor)

    def _run_micro_batches(self, batches: list[Batch]) -> torch.Tensor:
        """Forward and backward passes without a pipeline; this rank's loss, whose mean over ranks is the global one."""
        stage = self.stages[0]
        if self._unused is not None:
            self._unused.start_step()
        total = torch.zeros((), dtype=self.config.parameter_dtype, device=self.mesh.device)
        for index, (inputs, targets) in enumerate(batches):
            outputs = self._outputs(inputs)
            loss = self._loss(outputs, targets) / self._mean_divisor
            del outputs  # autograd keeps what it needs of them; logits in 16 bits it does not
            if self._unused is not None:
                loss = self._unused.complete(loss)
            self._prepare_backward(stage, index == len(batches) - 1)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if self._unused is not None:
            self._unused.drop_gradients([entry.parameter for entry in self._parameters_of_rank], self.mesh.device)
        return total

    def _outputs(self, inputs: Any) -> Any:
        """What the only stage makes of the inputs of one micro-batch."""
        stage, inputs = self.stages[0], for_users_code(inputs, self.config)
        return call_model(stage, inputs) if self._parallel_model is None else stage(*inputs)

    def _run_pipeline(self, batches: list[Batch]) -> torch.Tensor:
        """Forward and backward passes of the pipeline; the mean loss on ranks of the last stage, else zero."""
        assert self._pipeline is not None
        inputs = zip(*(inputs for inputs, _ in batches), strict=True)
        return self._pipeline.run_step(
            tuple(torch.cat(tensors) for tensors in inputs), [targets for _, targets in batches]
        )

    def _prepare_backward(self, stage: nn.Module, is_last_micro_batch: bool) -> None:
        prepare_backward(
            stage,
            zero_stage=self.config.zero_stage,
            is_last_micro_batch=is_last_micro_batch,
            waits_at_end=self.config.pp == 1,
        )

    def _finish_weights(self, stage: nn.Module, is_last_micro_batch: bool) -> None:
        finish_weights(stage, zero_stage=self.config.zero_stage, is_last_micro_batch=is_last_micro_batch)

    def _loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        loss = self._loss_fn(outputs, for_users_code(targets, self.config)).to(self.config.parameter_dtype)
        if self.config.ignored_target is not None:
            loss = weigh(loss, targets, ignored=self.config.ignored_target, mean=self._mean_count)
        return loss if self.loss_scale is None else loss * self.loss_scale.value

    def _checked(self, sums: torch.Tensor, own: torch.Tensor) -> AbstractContextManager[None]:
        """Around an update: figures that are not finite end the run, but where a loss scale deals with them, or where a
        rank alone has whatever they are.
        """
        if self.loss_scale is not None or is_alone():
            return nullcontext()
        return finite_update(self.optimizer, sums, own, step=self.n_steps, mesh=self.mesh)

    def _reduce_loss_and_norm(self, local_loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[global mean loss, squared norm of gradients, ranks told to stop], and this rank's part; sets `grad_norm`."""
        loss_share = self._share(local_loss)
        told = torch.full_like(loss_share, float(self.is_told_to_stop))
        own = torch.stack([loss_share, squared_norm_share(self._parameters_of_rank, self.mesh.device), told])
        sums = own.clone()
        if self.config.n_ranks > 1:
            dist.all_reduce(sums)
        self._n_told = sums[2]
        self.grad_norm = sums[1].sqrt() / self._scale
        return sums, own

    def _share(self, local_loss: torch.Tensor) -> torch.Tensor:
        """What this rank adds to the global mean loss."""
        return local_loss.to(torch.float64) / (self.config.dp * self.config.tp)

    @property
    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def _unscale_gradients(self) -> bool:
        """Take the loss scale out of the gradients; whether they are finite. Without fp16 there is nothing to do."""
        if self.loss_scale is None:
            return True
        if not torch.isfinite(self.grad_norm) and not is_alone():
            self.loss_scale.back_off()
            return False
        scale_gradients(self._parameters_of_rank, torch.tensor(1.0 / self._scale, device=self.mesh.device))
        self.loss_scale.grow()
        return True

    def _whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = whole(tensor)
        if self.whole.shapes.get(self.whole.first_name.get(name, name)) == ():
            return tensor.view(())
        shard = self.shards.get(name)
        if shard is None or self.mesh.tp_group is None:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.config.tp)]
        dist.all_gather(parts, tensor.contiguous(), group=self.mesh.tp_group)
        return join_shards(parts, shard)
