"""Runs that others published, as the library sees them: rows of `data/` -> cases for `published.py`."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autoplan.cost.grad_compression import NO_COMPRESSION, Compression
from autoplan.parallel_plan import Mesh

FOLDER = Path(__file__).parent
FILES = ("published_steps.csv", "published_steps_one_host.csv")
MODEL, BERT, RESNET = (FOLDER / "models" / f"{name}.py" for name in ("megatron", "bert_pretraining", "resnet_50"))
HARDWARE = {
    "A100-SXM-80GB": "dgx_a100_x8",
    "A100-SXM (HBM size not stated in repo)": "dgx_a100_x8",
    "V100-SXM2-16GB": "v100_x8",
    "V100-SXM3-32GB": "v100_x8",
}
VOCABULARY_MULTIPLE = 128
N_MASKED = {128: 20, 512: 80}  # predictions per sample, by tokens, of NVIDIA's BERT

Row = Mapping[str, str]
Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Program:
    """What the layouts and the operators of a row depend on, whatever its mesh."""

    sizes: Sizes
    hardware: str
    precision: str
    tp: int
    sharding: str
    file: Path = MODEL
    compression: Compression = NO_COMPRESSION


@dataclass(frozen=True, slots=True)
class Case:
    """A row as the library sees it; `recompute` is "none", "selective" (of the core of attention) or "full".

    `overlaps`: gradients are reduced beside the backward pass, not after it.
    """

    name: str
    source: str
    model: str
    program: Program
    mesh: Mesh
    recompute: str
    measured_s: float
    overlaps: bool = False


def rows() -> list[Row]:
    texts = ((FOLDER / "data" / name).read_text() for name in FILES)
    return [row for text in texts for row in csv.DictReader(text.splitlines())]


def reason_against(row: Row) -> str | None:
    """Why a row cannot be priced; None if it can."""
    reasons = {
        "sizes of the model not published": not (row["layers"] or is_resnet(row)),
        "step time or sequence length not published": not (
            row["measured_step_s"] and (row["seq_len"] or is_resnet(row))
        ),
        "micro-batch, recomputation and chunks not published": not row["micro_batch"],
        "compiled, which is not priced without a measured profile": "compile" in row["notes"],
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def is_resnet(row: Row) -> bool:
    return row["model"].startswith("ResNet50")


def case_of(row: Row) -> Case:
    """The program and the mesh of a row that can be priced."""
    if is_resnet(row) or row["model"].startswith("BERT"):
        return _example_case(row)
    number = {name: int(row[name]) for name in ("dp", "tp", "pp", "vpp", "micro_batch", "global_batch")}
    multiple = VOCABULARY_MULTIPLE * number["tp"]
    sizes = {
        "n_layers": int(row["layers"]),
        "n_heads": int(row["heads"]),
        "width": int(row["hidden"]),
        "hidden": int(row["ffn_hidden"]),
        "vocabulary": -(-int(row["vocab"]) // multiple) * multiple,
        "context": int(row["seq_len"]),
    }
    boundary = "S(1)" if row["seq_parallel"] == "1" else "R"
    sharding = boundary if number["tp"] > 1 else ""
    mesh = Mesh(
        pp=number["pp"],
        dp=number["dp"],
        tp=number["tp"],
        micro_batch_size=number["micro_batch"],
        n_micro_batches=number["global_batch"] // number["dp"] // number["micro_batch"],
        schedule="1f1b" if number["vpp"] == 1 else "interleaved",
        n_chunks=number["vpp"],
        sharding=sharding,
    )
    program = Program(tuple(sizes.items()), HARDWARE[row["gpu"]], row["precision"], number["tp"], sharding)
    return Case(
        name=row["id"],
        source=row["source"],
        model=row["model"],
        program=program,
        mesh=mesh,
        recompute=row["recompute"],
        measured_s=float(row["measured_step_s"]),
    )


def _example_case(row: Row) -> Case:
    """NVIDIA DeepLearningExamples: data parallel, nothing sharded.

    ResNet-50 in 16 bits has its images in channels_last (configs.yml). BERT sums its gradients once per step, after the
    last backward pass, in the precision of the program. Its sequences of up to 512 tokens came in bins of 64 lengths
    (scripts/run_pretraining.sh), so that hardly any padding was computed; priced are 512. LAMB and SGD are priced as
    AdamW, which moves 32 bytes per parameter: LAMB moves about 52, at most 1 % of these steps more.
    """
    n_devices, micro_batch = int(row["gpus"]), int(row["micro_batch"])
    is_16_bit, is_image = row["precision"] == "fp16", is_resnet(row)
    names = {"n_layers": "layers", "n_heads": "heads", "width": "hidden", "hidden": "ffn_hidden", "vocabulary": "vocab"}
    sizes = {} if is_image else {name: int(row[column]) for name, column in (names | {"context": "seq_len"}).items()}
    if not is_image:
        sizes["n_masked"] = N_MASKED[sizes["context"]]
    mesh = Mesh(
        dp=n_devices,
        micro_batch_size=micro_batch,
        n_micro_batches=int(row["global_batch"]) // n_devices // micro_batch,
        memory_format="channels_last" if is_image and is_16_bit else "contiguous",
    )
    compression = Compression("bf16") if is_16_bit and not is_image and n_devices > 1 else NO_COMPRESSION
    program = Program(
        tuple(sizes.items()),
        HARDWARE[row["gpu"]],
        row["precision"],
        tp=1,
        sharding="",
        file=RESNET if is_image else BERT,
        compression=compression,
    )
    device = row["gpu"].partition("-")[0]
    kind = "" if is_image else f", {row['seq_len']} tokens"
    source = f"{row['source']}: {row['model']}, {device}{kind}"
    measured_s = float(row["measured_step_s"])
    return Case(row["id"], source, row["model"], program, mesh, "none", measured_s, overlaps=is_image)
