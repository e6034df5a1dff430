"""Generated programs for equivalence tests: small graphs, plans of any shape, and their check on gloo processes."""

import importlib
import random
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

from autoplan.analysis.padded_head import with_padded_head
from autoplan.codegen import config_values, generate
from autoplan.graph import OpGraph
from autoplan.layout import EXCHANGE, Conversion, local_spec
from autoplan.parallel_plan import Mesh, Plan, StagePlan
from autoplan.rules import forward_flops, load_rules, operand_names
from autoplan.solver.solve import minimize
from autoplan.tensor_parallel.sharding import ShardingPrices, shard_graph
from autoplan.tracing.graph_cache import cached_graph

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt.py", {"n_layers": 4, "n_heads": 4, "width": 32, "context": 16}),
    "llama": (
        "llama.py",
        {
            "n_layers": 4,
            "n_heads": 8,
            "n_kv_heads": 4,
            "width": 64,
            "hidden": 96,
            "vocabulary": 64,
            "context": 16,
        },
    ),
    "gpt_dropout": ("gpt.py", {"n_layers": 2, "n_heads": 4, "width": 32, "context": 16, "dropout": 0.2}),
    "gpt_deep": ("gpt.py", {"n_layers": 7, "n_heads": 4, "width": 32, "context": 16}),
    "llama_deep": (
        "llama.py",
        {"n_layers": 7, "n_heads": 4, "n_kv_heads": 2, "width": 32, "hidden": 48, "vocabulary": 64, "context": 16},
    ),
    # a vocabulary, and below it every size, that no degree divides
    "gpt_odd": ("gpt.py", {"n_layers": 2, "n_heads": 4, "width": 32, "context": 16, "vocabulary": 131}),
    "gpt_padded": ("gpt.py", {"n_layers": 2, "n_heads": 4, "width": 32, "context": 16, "vocabulary": 131}),
    "llama_odd": (
        "llama.py",
        {"n_layers": 2, "n_heads": 5, "n_kv_heads": 5, "width": 30, "hidden": 45, "vocabulary": 65, "context": 15},
    ),
    "llama_padded": (
        "llama.py",
        {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "width": 32, "hidden": 48, "vocabulary": 65, "context": 16},
    ),
    "mlp": ("mlp.py", {"width": 32, "depth": 4}),
    "own_loss": ("../tests/distributed/own_loss.py", {"width": 16, "depth": 4}),
    "mixed_dtypes": ("../tests/distributed/mixed_dtypes.py", {}),
    "picked_loss": ("../tests/distributed/picked_loss.py", {}),
    "scalars": ("../tests/distributed/scalars.py", {}),
    "numbered": ("../tests/distributed/numbered.py", {}),
    "in_place": ("../tests/distributed/in_place.py", {}),
    "writes_batch": ("../tests/distributed/writes_batch.py", {}),
    "crossing": ("../tests/distributed/crossing.py", {"width": 16, "depth": 6}),
    "siamese": ("../tests/distributed/siamese.py", {}),
    "torch_transformer": ("../tests/families/torch_transformer.py", {}),
    "returned": ("../tests/distributed/returned.py", {}),
    "odd_names": ("../tests/distributed/odd_names.py", {}),
    "in_batch": ("../tests/distributed/in_batch.py", {}),
    "lent": ("../tests/distributed/lent.py", {}),
    "turns": ("../tests/distributed/turns.py", {}),
    "two_ways": ("../tests/distributed/two_ways.py", {}),
    "unet": ("../tests/families/unet.py", {}),
    "bert": ("../tests/families/bert_hf.py", {}),
    "resnet": ("../tests/families/resnet.py", {"depths": (2, 2)}),
    "data_dependent": ("../tests/families/data_dependent.py", {}),
}
MODULE_LEVEL = {"data_dependent"}
PADDED_HEADS = {"gpt_padded", "llama_padded"}  # however small


# A step from no state of the optimizer and one from some, and the parameters after it: a third is as the second.
N_STEPS = 2

Row = tuple[str, dict[str, Any], dict[str, Any], bool]  # name, overrides, fields of Config, has a parallel model


@cache
def graph_of(model: str) -> OpGraph:
    """The graph of a small model of `MODELS`, traced once for all test processes."""
    file, overrides = MODELS[model]
    way = "modules" if model in MODULE_LEVEL else ""
    graph = cached_graph(EXAMPLES / file, overrides, lambda: _traced(model), way=way)
    return with_padded_head(graph, smallest_weight_elements=0) if model in PADDED_HEADS else graph


def _traced(model: str) -> OpGraph:
    from autoplan.tracing.model_source import model_source
    from autoplan.tracing.module_level import trace_modules
    from autoplan.tracing.trace import trace_model

    file, overrides = MODELS[model]
    trace = trace_modules if model in MODULE_LEVEL else trace_model
    return trace(model_source(EXAMPLES / file, overrides))


PADDED = 1.1  # times its share a rank may do because extents are padded


def prices(graph: OpGraph, degree: int, *, seed: int | None = None) -> ShardingPrices:
    """Arithmetic is dear and communication cheap, so that everything is split; with a seed, anything may happen.

    A split op costs its share, or what its rule says that a rank does if that is clearly more.
    """
    rules, specs, dice = load_rules(), graph.specs(), random.Random(seed)

    def scaled(value: float) -> float:
        return value if seed is None else value * 10 ** dice.uniform(-3, 3)

    def converted_s(step: Conversion) -> float:
        return 1e-6 + 1e-7 * (bool(step.forward) + bool(step.backward))

    def op_s(op: Any, strategy: Any) -> float:
        whole = tuple(specs[name] for name in operand_names(op))
        local = tuple(local_spec(spec, y, degree) for spec, y in zip(whole, strategy.operands, strict=True))
        n_flops, n_local = (
            forward_flops(rules.get(op.target), op, operands=operands, batch_size=1, whole_operands=whole)
            for operands in (whole, local)
        )
        share = (1 + n_flops) / degree
        work = n_local if n_local > PADDED * share else share
        return scaled(
            (work if strategy.is_split else 1 + n_flops) * 1e-6 + converted_s(EXCHANGE) * len(strategy.exchanged)
        )

    return ShardingPrices(
        op_s=op_s,
        conversion_s=lambda spec, step: scaled(converted_s(step)),
        parameter_s=lambda spec, layout: scaled(1e-6 if layout.kind == "S" else 2e-6),
    )


@cache
def shardings_of(model: str, degree: int, seed: int | None = None) -> dict[str, Any]:
    """The tensor-parallel assignments of a model by boundary."""
    graph = graph_of(model)
    return shard_graph(
        graph,
        degree=degree,
        rules=load_rules(),
        prices=prices(graph, degree, seed=seed),
        solve=partial(minimize, time_limit_s=None),
    )


def make_plan(model: str, *, seed: int | None = None, recompute: str = "none", **mesh_fields: Any) -> Plan:
    """A plan with evenly cut stages."""
    graph, mesh = graph_of(model), Mesh(**mesh_fields)
    n = len(graph.segments)
    ends = [round(i * n / mesh.n_stages) for i in range(mesh.n_stages + 1)]
    stages = []
    for start, stop in zip(ends, ends[1:], strict=False):
        blocks = tuple(i for i in range(start, stop) if graph.segments[i].is_block)
        recomputed = {"none": (), "full": blocks, "half": blocks[::2]}[recompute]
        stages.append(StagePlan(start, stop, recomputed))
    shardings = shardings_of(model, mesh.tp, seed)[mesh.sharding] if mesh.tp > 1 else ()
    return Plan(mesh, tuple(stages), precision="fp64", shardings=shardings)


def write_programs(root: Path, cases: dict[str, tuple[str, Plan]]) -> list[Row]:
    """Each case as modules `model_<name>` and `parallel_<name>` beside one `runtime/`; what `check_programs` needs."""
    rows, runtime = [], {}
    for name, (model, plan) in cases.items():
        file, overrides = MODELS[model]
        program = generate(
            graph_of(model),
            plan,
            rules=load_rules(),
            header=name,
            model_text=(EXAMPLES / file).read_text(),
            overrides=overrides,
        )
        texts = dict(program.files)
        for path, text in texts.items():
            if path.startswith("runtime/") and runtime.get(path) != text:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(text)
                runtime[path] = text
        (root / f"model_{name}.py").write_text(texts["model.py"])
        if "parallel_model.py" in texts:
            (root / f"parallel_{name}.py").write_text(texts["parallel_model.py"])
        rows.append((name, overrides, config_values(graph_of(model), plan), "parallel_model.py" in texts))
    return rows


def check_programs(root: str, rows: list[Row], n_steps: int = N_STEPS) -> dict[str, list[Any]]:
    """On one rank: the largest differences from one process, per program and step."""
    sys.path.insert(0, root)
    sys.modules["autoplan.tracing.trace"] = None  # type: ignore[assignment]
    runtime = importlib.import_module("runtime")
    found = {}
    for name, overrides, config_fields, is_rewritten in rows:
        config = runtime.Config(**config_fields)
        model_file = importlib.import_module(f"model_{name}")
        parallel = importlib.import_module(f"parallel_{name}") if is_rewritten else None
        mesh = runtime.build_rank_mesh(config, "cpu")
        options = {"overrides": overrides, "seed": 0, "learning_rate": 1e-3, "max_grad_norm": 1.0}
        program = runtime.ParallelModel(config, model_file, parallel, mesh=mesh, **options)
        device = program.full_build_device
        plain = runtime.PlainTraining(config, model_file, build_device=device, device=mesh.device, **options)
        steps = list(runtime.check_steps(program, plain, model_file, n_steps=n_steps, seed=0))
        differences = [step.differences for step in steps]
        found[name] = [(step.loss, step.gradient, step.unexplained, step.buffer) for step in differences]
    return found
