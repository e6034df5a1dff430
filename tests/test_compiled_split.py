"""What a compiled block keeps on ranks that split it, against what torch's partitioner keeps of the generated class."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed.launch import run_ranks
from distributed.programs import MODELS, graph_of, make_plan

from autoplan.codegen.parallel_model import parallel_model_text
from autoplan.cost.compiled_work import compiled_passes, compiled_segment
from autoplan.cost.fusions import fused_segment
from autoplan.cost.local_segment import local_segment
from autoplan.cost.work_context import work_contexts
from autoplan.hardware import load_hardware_profile
from autoplan.parallel_plan import Plan
from autoplan.rules import load_rules
from autoplan.runtime import Config
from autoplan.runtime.alone import join_alone
from autoplan.runtime.stages.compiled import compiled
from autoplan.tensor_parallel.sharding import read_sharding

WIDTH, CONTEXT, HEAD_DIM, BATCH = 256, 128, 32, 4
SIZES = {"n_heads": 8, "n_kv_heads": 4, "width": WIDTH, "hidden": 768, "vocabulary": 64, "context": CONTEXT}
MODELS["llama_wide"] = ("llama.py", {"n_layers": 2, **SIZES})


@pytest.mark.parametrize(("sharding", "n_rows"), [("R", CONTEXT), ("S(1)", CONTEXT // 2)])
def test_it_keeps_what_torch_keeps(tmp_path: Path, sharding: str, n_rows: int) -> None:
    plan = make_plan("llama_wide", tp=2, sharding=sharding)
    text = parallel_model_text(graph_of("llama_wide"), plan, rules=load_rules())
    (tmp_path / "split_blocks.py").write_text(text.replace("from runtime.", "from autoplan.runtime."))
    (by_torch,) = run_ranks(_kept_by_torch, 1, str(tmp_path), n_rows, backend="")
    assert _priced(plan) == pytest.approx(by_torch, rel=0.02)


def _priced(plan: Plan) -> int:
    graph = graph_of("llama_wide")
    segment = next(segment for segment in graph.segments if segment.is_block)
    context = work_contexts(graph, load_hardware_profile("h200_x4"), "bf16", load_rules())(2)
    assignment = next(found for found in plan.shardings if found.kind == segment.kind)
    layouts = read_sharding(graph, segment, assignment, degree=2, rules=context.rules, facts=context.facts)
    local = local_segment(context, segment, layouts)
    block = compiled_segment(context, local, fused_segment(context, segment, local))
    return compiled_passes(context, block, BATCH).saved_bytes


def _kept_by_torch(folder: str, n_rows: int) -> int:
    """Bytes that the compiled first block keeps beside its parameters and its tables of positions."""
    sys.path.insert(0, folder)
    join_alone(0, config=Config(tp=2))
    with torch.device("meta"):
        block = importlib.import_module("split_blocks").Block(dist.group.WORLD)
    block = block.to_empty(device="cpu").bfloat16()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tables = [torch.randn(CONTEXT, HEAD_DIM).bfloat16() for _ in range(2)]
    given = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *tables)}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(BATCH, n_rows, WIDTH).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        compiled(block.forward, torch.device("cpu"))(x, *tables)
    return sum(n_bytes for place, n_bytes in kept.items() if place not in given)
