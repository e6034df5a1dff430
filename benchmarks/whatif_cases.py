"""Published pairs of runs against the ratios that what-if gives, with the plans of the publications fixed.

    python benchmarks/whatif_cases.py [--all | WORDS OF A NAME]

What counts is a ratio: how much faster another device, how much slower more of them, so what the programs of others did
otherwise (older kernels) cancels where both runs did it; fms-fsdp alone compiled. Absolute times are in `published.py`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from autoplan.checks.options import parse_fix
from autoplan.options import AS_COMPUTED, Options
from autoplan.plain_text import text_table
from autoplan.what_if.asking import ask
from autoplan.what_if.question import Question
from autoplan.what_if.rows import WhatIfRow

EXAMPLES = Path(__file__).parent.parent / "examples"
LLAMA, GPT = str(EXAMPLES / "llama.py"), str(EXAMPLES / "gpt.py")
SIZES = {
    "7b": {"size": "7b"},
    "13b": {"size": "7b", "n_layers": 40, "n_heads": 40, "n_kv_heads": 40, "width": 5120, "hidden": 13824},
    "70b": {"size": "70b", "vocabulary": 32000},
}
FMS = "foundation-model-stack/fms-fsdp: tokens/s per device, 128 A100 and 96 H100"
ATORCH = "intelligent-machine-learning/dlrover, atorch: TFLOP/s per device, Llama 2 7B on A100"
MT_NLG = "arXiv:2201.11990: seconds of a step, 530B, batch 1920, on 280, 350 and 420 DGX A100"
KORTHIKANTI = "arXiv:2205.05198, table 5: seconds of a step, GPT 22B and 175B on A100, recomputation full and selective"
TWO_PROGRAMS = (
    "two programs, DeepSpeed with tensor parallelism and ATorch's FSDP. In the same table tensor parallelism over 2 of"
    " 8 devices in one host costs the former 18 % (190.27 to 155.73 TFLOP/s), where NVLink explains 3 to 5 %. Nor did"
    " they recompute alike: published peaks are 22.2 and 30.4 GiB; with all blocks recomputed 18.9 and 7.2 GiB are"
    " predicted for 2,048 tokens, 27.1 and 12.2 GiB for 4,096, with none 59.9 and 42.7 GiB for 2,048"
)
REPEATS_ALL = (
    "Megatron-LM's full recomputation ran all of a block again; torch's, which programs here have, stops before the"
    " last product of a block, a third of its products with weights"
)
SEARCH_S = 30.0  # of processor time; these searches end before it, so the ratio is not that of two unfinished ones
EIGHT_STAGES = "pp=8,micro_batch=1,schedule=interleaved"
MEGATRON = "Megatron-LM README, strong scaling: MFU, 177B, batch 1152, on 96 and 4608 H100"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a publication: where, what, and by which plan."""

    hw: str
    n_hosts: int
    global_batch: int
    fix: str
    model: str = LLAMA
    overrides: tuple[tuple[str, object], ...] = ()
    network_scale: float = 1.0
    search: str = "quick"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs and the published ratio of their tokens per second and device, second to first.

    Attributes:
        counts_recomputed: the ratio is of FLOPs that ran, recomputed ones too, which hardly depends on what the
            publication leaves out: sequence length and recomputation.
        differs: why the two runs are not the two jobs that are predicted, with what shows it.
    """

    name: str
    first: Run
    second: Run
    published: float
    source: str
    counts_recomputed: bool = False
    differs: str = ""


def _llama(size: str, hw: str, n_hosts: int, batch: int, fix: str, *, scale: float = 1.0) -> Run:
    return Run(hw, n_hosts, batch, fix, LLAMA, tuple({**SIZES[size], "context": 4096}.items()), scale)


def _fms(size: str, published: float, *, recompute: str) -> Pair:
    fix = f"zero=3,micro_batch=2,tp=1,pp=1,compile=on{recompute}"
    return Pair(
        f"Llama 2 {size}: A100 to H100",
        _llama(size, "dgx_a100_x8+infiniband_100g", 16, 256, f"dp=128,{fix}"),
        _llama(size, "dgx_h100_x8+infiniband_100g", 12, 192, f"dp=96,{fix}", scale=2.0),
        published,
        FMS,
    )


def _fsdp(n_hosts: int) -> Run:
    fix = f"dp={8 * n_hosts},tp=1,pp=1,zero=3,micro_batch=4,compile=off"
    return _llama("7b", "dgx_a100_x8+infiniband_200g", n_hosts, 32 * n_hosts, fix, scale=0.5)


def _three_axes(n_hosts: int) -> Run:
    fix = f"dp={2 * n_hosts},tp=2,pp=2,zero=1,micro_batch=8,schedule=1f1b,compile=off"
    return _llama("7b", "dgx_a100_x8+infiniband_200g", n_hosts, 1024 * n_hosts, fix, scale=0.5)


def _mt_nlg(n_hosts: int) -> Run:
    sizes = (("size", "175b"), ("n_layers", 105), ("n_heads", 128), ("width", 20480))
    fix = f"dp={n_hosts // 35},tp=8,pp=35,zero=0,micro_batch=1,recompute=full,schedule=1f1b,compile=off"
    return Run("dgx_a100_x8", n_hosts, 1920, fix, GPT, sizes)


def _gpt(size: str, n_hosts: int, batch: int, fix: str) -> Run:
    return Run(
        "dgx_a100_x8", n_hosts, batch, f"dp=1,tp=8,zero=0,compile=off,{fix}", GPT, (("size", size),), search="full"
    )


def _megatron(n_hosts: int) -> Run:
    return Run(
        "dgx_h100_x8",
        n_hosts,
        1152,
        "tp=8,compile=off",
        GPT,
        (("size", "175b"), ("context", 4096), ("vocabulary", 131072)),
        search="full",
    )


SMALL = (
    _fms("7b", 9600 / 4550, recompute=",recompute=none"),
    _fms("13b", 4850 / 2150, recompute=""),
    _fms("70b", 890 / 410, recompute=""),
    Pair("Llama 2 7B, ZeRO 3: 8 to 64 A100", _fsdp(1), _fsdp(8), 195.14 / 204.67, ATORCH, counts_recomputed=True),
    Pair(
        "Llama 2 7B, 3-D: 16 to 64 A100",
        _three_axes(2),
        _three_axes(8),
        153.93 / 154.84,
        ATORCH,
        counts_recomputed=True,
    ),
    Pair(
        "GPT 22B, 8 A100: full to no recomputation",
        _gpt("22b", 1, 4, "pp=1,micro_batch=4,recompute=full"),
        _gpt("22b", 1, 4, "pp=1,micro_batch=4,recompute=none"),
        1.42 / 1.10,
        KORTHIKANTI,
        differs=REPEATS_ALL,
    ),
    Pair(
        "GPT 175B, 64 A100: full to selective recomputation",
        _gpt("175b", 8, 64, f"{EIGHT_STAGES},recompute=full"),
        _gpt("175b", 8, 64, f"{EIGHT_STAGES},recompute=selective"),
        18.13 / 13.75,
        KORTHIKANTI,
        differs=REPEATS_ALL,
    ),
    Pair(
        "Llama 2 7B, 64 A100: 3-D to ZeRO 3",
        _three_axes(8),
        _fsdp(8),
        195.14 / 153.93,
        ATORCH,
        counts_recomputed=True,
        differs=TWO_PROGRAMS,
    ),
)
LARGE = (
    Pair("GPT 530B: 280 to 350 hosts", _mt_nlg(280), _mt_nlg(350), 60.1 / 50.2 * 280 / 350, MT_NLG),
    Pair("GPT 530B: 280 to 420 hosts", _mt_nlg(280), _mt_nlg(420), 60.1 / 44.4 * 280 / 420, MT_NLG),
    # 0.47 of 989.5 TFLOP/s at 72 x 96 x 12288^2 x (1 + 4096 / (6 x 12288) + 131072 / (12 x 96 x 12288)) FLOPs a token
    Pair(
        "GPT 175B: 64 A100 to 96 H100",
        _gpt("175b", 8, 64, f"{EIGHT_STAGES},recompute=selective"),
        _megatron(12),
        0.47 * 989.5e12 / 1.1113e12 / 148.95,
        f"{KORTHIKANTI}; {MEGATRON}",
    ),
    Pair("GPT 177B: 96 to 4608 H100", _megatron(12), _megatron(576), 0.42 / 0.47, MEGATRON),
)

# Above 10 %: of pairs whose runs are not the same jobs, see `differs`; and of compiled Llama 2, whose steps are
# predicted too slow, most of them more on A100 than on H100 (`published_terms.py`).
KNOWN_ERRORS = (
    ("Llama 2 7b: A100 to H100", 0.17),  # since attention on Hopper is priced as cuDNN's, and A100 fitted again
    ("Llama 2 70b: A100 to H100", 0.15),
    ("Llama 2 7B, 64 A100: 3-D to ZeRO 3", 0.25),
    ("GPT 175B, 64 A100: full to selective recomputation", 0.11),
)


def row_of(run: Run) -> WhatIfRow:
    """What what-if says of a run."""
    question = Question(
        model=run.model,
        hw=(run.hw,),
        hosts=(run.n_hosts,),
        overrides=run.overrides,
        global_batches=(run.global_batch,),
        network_scales=(run.network_scale,),
        search=run.search,
        time_limit_s=SEARCH_S,
        # these plans ran, kernel by kernel
        options=Options(fix=parse_fix([run.fix, "cuda_graph=off"]), memory_confidence=AS_COMPUTED),
    )
    return ask(question, n_jobs=1).rows[0]


def rate(row: WhatIfRow, *, counts_recomputed: bool = False) -> float:
    """Tokens per second and device; with what is recomputed counted in proportion to its time, as if it were more."""
    assert row.tokens_per_s is not None, row
    shares = dict(row.shares)
    again = shares["recompute"] / shares["compute"] if counts_recomputed else 0.0
    return row.tokens_per_s / row.n_devices * (1.0 + again)


def predicted(pair: Pair) -> float:
    """The ratio by what-if."""
    first, second = (rate(row_of(run), counts_recomputed=pair.counts_recomputed) for run in (pair.first, pair.second))
    return second / first


def main(pairs: tuple[Pair, ...]) -> None:
    """Print the table."""
    cells = []
    for pair in pairs:
        found = predicted(pair)
        cells.append((pair.name, f"{pair.published:.3f}", f"{found:.3f}", f"{found / pair.published - 1:+.1%}"))
        print(*cells[-1], file=sys.stderr)
    print(text_table(("rate of a device", "published", "what-if", "error"), cells, right=frozenset({1, 2, 3})))
    print("\n".join(f"not the same jobs: {pair.name}: {pair.differs}" for pair in pairs if pair.differs))
    print("\n".join(sorted({pair.source for pair in pairs})))


if __name__ == "__main__":
    wanted = [text for text in sys.argv[1:] if not text.startswith("--")]
    chosen = (*SMALL, *LARGE) if "--all" in sys.argv or wanted else SMALL
    main(tuple(pair for pair in chosen if all(text in pair.name for text in wanted)))
