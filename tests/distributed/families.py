"""Every family of models under every kind of parallelism: the cases that the tests and the README's table share."""

from pathlib import Path
from typing import Any

from distributed.programs import MODELS, graph_of, make_plan

from autoplan.graph import computes_in_float32
from autoplan.layout import parse_layout
from autoplan.parallel_plan import Plan

FOLDER = Path(__file__).parent.parent / "families"
FAMILIES = {
    "GPT, fused QKV, tied head": "gpt",
    "GPT-2 (HF): Conv1D": "gpt2_hf",
    "Llama": "llama",
    "Llama (HF), 2 key-value heads": "llama_hf",
    "Mistral (HF), sliding window": "mistral_hf",
    "Qwen 3 (HF), normalized queries": "qwen_hf",
    "BERT (HF)": "bert_hf",
    "T5 (HF): encoder, decoder, shared bias": "t5_hf",
    "nn.Transformer, causal and padding masks": "torch_transformer",
    "Mixtral (HF): mixture of experts": "mixtral_hf",
    "Mixture of experts": "mixture",
    "ViT (HF)": "vit_hf",
    "ResNet, BatchNorm": "resnet",
    "U-Net, skips": "unet",
    "State-space sequence model": "state_space",
    "LSTM": "lstm",
    "Diffusion transformer": "diffusion_transformer",
    "Two towers, two losses": "two_tower",
    "Conformer, CTC loss": "conformer",
    "Fourier neural operator": "fourier",
    "Operator without a rule": "custom_op",
    "Shared layers": "shared_layers",
    "MLP": "mlp",
}
_DECODERS: dict[str, dict[str, Any]] = {
    "llama_hf": {"kind": "llama"},
    "mistral_hf": {"kind": "mistral", "sliding_window": 8},
    "qwen_hf": {"kind": "qwen3", "head_dim": 8},
    "mixtral_hf": {"kind": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}
MODELS.update({path.stem: (f"../tests/families/{path.name}", {}) for path in FOLDER.glob("*.py")})
MODELS.update({name: ("../tests/families/decoder_hf.py", fields) for name, fields in _DECODERS.items()})

_ZERO3 = {"dp": 2, "zero_stage": 3, "zero_shard_degree": 2}
FEATURES: dict[str, dict[str, Any]] = {
    "DP 2": {"dp": 2, "micro_batch_size": 2, "n_micro_batches": 2},
    "ZeRO 3": {**_ZERO3, "n_micro_batches": 2},
    "recompute": {**_ZERO3, "recompute": "full"},
    "TP 2": {"tp": 2, "sharding": "R", "micro_batch_size": 3},
    "TP 2, split sequence": {"tp": 2, "sharding": "S(1)", "micro_batch_size": 2},
    "TP 4": {"tp": 4, "sharding": "R", "micro_batch_size": 2},
    "PP 2": {"pp": 2, "micro_batch_size": 2, "n_micro_batches": 4},
    "PP 4": {"pp": 4, "n_micro_batches": 4},
    "compiled, DP 2": {"dp": 2, "micro_batch_size": 2, "n_micro_batches": 2, "compile": True},
    "compiled, TP 2": {"tp": 2, "sharding": "R", "micro_batch_size": 3, "compile": True},
    "PP 2 x TP 2 x ZeRO 3 x recompute": {
        **_ZERO3, "pp": 2, "tp": 2, "sharding": "R", "n_micro_batches": 2, "recompute": "full",
    },
}  # fmt: skip


def n_ranks(feature: str) -> int:
    """How many processes a feature takes."""
    mesh = FEATURES[feature]
    return int(mesh.get("dp", 1) * mesh.get("tp", 1) * mesh.get("pp", 1))


def family_plan(model: str, feature: str, *, seed: int | None = None) -> Plan:
    """The plan of one case.

    Raises: KeyError when the model cannot have the boundary; RuntimeError when it has too few segments.
    """
    n_stages = FEATURES[feature].get("pp", 1)
    if n_stages > len(graph_of(model).segments):
        raise RuntimeError(f"{n_stages} stages of {len(graph_of(model).segments)} segments")
    return make_plan(model, seed=seed, **FEATURES[feature])


def sharded_fraction(model: str, plan: Plan) -> float:
    """Which part of the trainable elements is split over the tensor-parallel ranks."""
    graph = graph_of(model)
    kinds = {sharding.kind: dict(sharding.values) for sharding in plan.shardings}
    split: set[str] = set()
    for segment in graph.segments:
        first = graph.first_of_kind()[segment.kind]
        for name, own in zip(first.parameters, segment.parameters, strict=True):
            if parse_layout(kinds[segment.kind][name]).kind == "S":
                split.add(own)
    sizes = {p.name: p.spec.n_elements(1) for p in graph.parameters if p.is_trainable}
    return sum(size for name, size in sizes.items() if name in split) / sum(sizes.values())


def tolerance(model: str) -> float:
    """Largest accepted difference from one process: 1e-9, or 1e-5 where the model itself computes in float32."""
    return 1e-5 if computes_in_float32(graph_of(model)) else 1e-9
