"""Every mesh of the space: which degrees, micro-batches and schedules are tried at all.

A mesh is in the space when all of this holds:

    dp * micro_batch_size * n_micro_batches = global_batch      exactly; no ragged batch
    n_micro_batches <= 8192                                     `MAX_MICRO_BATCHES`; each is replayed
    dp * tp * pp = a device count                               see `device_counts`
    tp one of `tensor_degrees`: within a host, or its links     unless the user fixes tp
    pp * n_chunks <= pieces the model can be cut into
    n_chunks a power of two <= 4, pp * n_chunks <= 32           unless the user fixes chunks; 1 under 1f1b and gpipe
    1f1b: n_micro_batches >= pp;  interleaved: n_micro_batches a multiple of pp
    compressed gradients: dp above 1; shards over all of dp; PowerSGD with zero_stage 0
    zero_bubble_v: n_chunks 2, n_micro_batches >= pp, zero_stage at most 2, nothing recomputed, nothing compiled

Beyond the space, `deeper_pipelines` tries pipelines with n_chunks up to 8 and pp * n_chunks up to 128; no proof is of
these.

Where recomputation may keep attention, each mesh but those of zero_bubble_v has a twin that does; it enters the search
only when its mesh has been looked at, see `twins`.

Each plan has one name only (canonical form): zero_stage 0 exactly when zero_shard_degree is 1; dp = 1 has zero_stage 0;
one micro-batch, which is reduced at its end in any case, has no zero_stage 2 unless the user fixes it; pp = 1 has
schedule "1f1b" and one chunk; a plan that recomputes no attention does not keep it. How many pieces each stage may
have, says `plans.stage_sizes`.

**More devices never hurt.** A cluster of n devices also tries smaller device counts and leaves the rest idle: below one
host the powers of two and the divisors of the host, then k hosts for every k of at most `MAX_SIGNIFICANT_BITS`
significant bits (1 to 16, 18, 20, ... 32, 36, ...), then n itself. For such counts the space of the larger cluster
contains that of the smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import count, product
from math import isqrt, prod
from typing import NamedTuple, NoReturn

from autoplan.cost.table import CostTable
from autoplan.errors import InfeasibleError, InputError
from autoplan.options import PLAIN_SCHEDULE, Options
from autoplan.parallel_plan import ZERO_STAGES, Execution, Mesh, Plan, StagePlan
from autoplan.schedules import splits_backward
from autoplan.search.fixed_values import value_of_mesh

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble_v")
MAX_SPLIT_ZERO_STAGE = 2  # of a split backward pass: its halves need the parameters that the forward pass gathered
MAX_MICRO_BATCHES = 2**13  # of a step: nobody accumulates over so many, and a replay takes a quarter of a second
MAX_SIGNIFICANT_BITS = 4
MAX_CHUNKS, MAX_INTERLEAVED_STAGES = 4, 32
DEEPER_CHUNKS, DEEPER_STAGES = 8, 128  # beyond the space

Price = Callable[[Mesh], CostTable]
MakePlan = Callable[[Mesh, tuple[StagePlan, ...]], Plan]


class Captures(NamedTuple):
    """Whether passes may, or must, be a CUDA graph; see `SearchSpace.cuda_graph`."""

    own: tuple[bool, ...] = (False,)
    generated: tuple[bool, ...] = (False,)
    shards: tuple[bool, ...] = (False,)


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What may be searched, as numbers; several values of a choice stand in the order in which they are tried.

    Attributes:
        kinds: the kind of each segment, in order.
        cuts: per boundary between neighbouring segments, whether the pipeline may be cut there.
        why_uncut: which boundaries are not among them that might be, and why; "" for none.
        shardings: per tensor-parallel degree that exists for this model, the keys of its shardings; (1, ("",)) first.
        max_chunks: most stages per rank of an interleaved schedule, where they are not fixed; powers of two are tried.
        max_interleaved_stages: most stages in all of a schedule with several stages per rank; likewise.
        executions: how modules may run, as far as that has a price.
        generated: whether programs without tensor and pipeline parallelism may be, or must be, generated code.
        wraps_head: whether programs of the user's own classes have the head in a group of its own.
        n_devices_joined: devices on the links of one host, where these join several hosts; None where they do not.
        keeps_attention: whether recomputation may, or must, keep attention; where it may, see `twins`.
        cuda_graph: whether passes may, or must, be a CUDA graph: those of the user's own classes, of generated code,
            and of generated code with tensor parallelism.
        lists_plain: whether a mesh that may be one or not is listed both ways. Else it has a graph, and the same mesh
            without enters when that has been priced and may lack memory; see `without_graph`.
        uses_all_devices: no device may be left idle, because as many processes are already running.
    """

    n_devices: int
    n_devices_per_host: int
    global_batch: int
    kinds: tuple[int, ...]
    cuts: tuple[bool, ...]
    shardings: tuple[tuple[int, tuple[str, ...]], ...] = ((1, ("",)),)
    schedules: tuple[str, ...] = SCHEDULES
    zero_stages: tuple[int, ...] = ZERO_STAGES
    max_chunks: int = MAX_CHUNKS
    max_interleaved_stages: int = MAX_INTERLEAVED_STAGES
    uses_all_devices: bool = False
    executions: tuple[Execution, ...] = (Execution(),)
    generated: tuple[bool, ...] = (False,)
    wraps_head: bool = False
    keeps_attention: tuple[bool, ...] = (False,)
    cuda_graph: Captures = Captures()
    lists_plain: bool = False
    why_uncut: str = ""
    n_devices_joined: int | None = None

    def graphs_of(self, *, tp: int, is_own: bool) -> tuple[bool, ...]:
        """Whether passes may, or must, be a CUDA graph; `is_own`: of the user's own classes."""
        return self.cuda_graph.own if is_own else self.cuda_graph.generated if tp == 1 else self.cuda_graph.shards

    @property
    def plain_enters(self) -> bool:
        """Whether meshes without a CUDA graph enter the search later; see `lists_plain`."""
        return not self.lists_plain and any(len(graphs) > 1 for graphs in self.cuda_graph)

    @property
    def may_keep_attention(self) -> bool:
        """Whether plans that recompute attention may keep it."""
        return True in self.keeps_attention

    @property
    def must_keep_attention(self) -> bool:
        """Whether all of them do."""
        return False not in self.keeps_attention

    @property
    def n_on_links(self) -> int:
        """Devices on the links of one host."""
        return self.n_devices_joined or self.n_devices_per_host

    @property
    def n_segments(self) -> int:
        """How many segments the model has."""
        return len(self.kinds)

    @property
    def n_pieces(self) -> int:
        """The most pipeline stages the model can be cut into."""
        return 1 + sum(self.cuts)


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def tensor_degrees(*, n_devices_per_host: int, n_on_links: int) -> tuple[int, ...]:
    """Degrees of tensor parallelism that are tried, ascending.

    The divisors of the devices of a host; where its links join several hosts, `n_on_links` devices, also the devices
    of 2, 4, 8, ... of these hosts.
    """
    n_hosts = n_on_links // n_devices_per_host
    return (*divisors(n_devices_per_host), *(n_devices_per_host * 2**k for k in range(1, n_hosts.bit_length())))


def fixed(options: Options, name: str) -> str | None:
    """The value the user fixed, or None."""
    return dict(options.fix).get(name)


def fixed_int(options: Options, name: str) -> int | None:
    """The fixed value as a number of at least 0.

    Raises: InputError if it is not one.
    """
    text = fixed(options, name)
    if text is None:
        return None
    if not text.isdecimal():
        raise InputError.of(f"fix {name}", found=text, expected="a whole number", fix=f"write {name}=1, for instance")
    return int(text)


def device_counts(space: SearchSpace) -> tuple[int, ...]:
    """How many devices a plan may use, largest first. See the module docstring."""
    if space.uses_all_devices:
        return (space.n_devices,)
    return device_counts_of(space.n_devices, n_devices_per_host=space.n_devices_per_host)


def device_counts_of(n_devices: int, *, n_devices_per_host: int) -> tuple[int, ...]:
    """Likewise of a cluster, where devices may be left idle."""
    host = min(n_devices_per_host, n_devices)
    powers = {2**k for k in range(host.bit_length()) if 2**k <= host}
    n_hosts = n_devices // n_devices_per_host
    few_bits = range(1, 2**MAX_SIGNIFICANT_BITS)
    hosts = {k << zeros for k in few_bits for zeros in range(n_hosts.bit_length()) if k << zeros <= n_hosts}
    counts = {*powers, *divisors(host), *(k * n_devices_per_host for k in hosts), n_devices}
    return tuple(sorted(counts, reverse=True))


def significant_bits(number: int) -> int:
    """Binary digits from the first to the last 1."""
    return len(bin(number)[2:].rstrip("0"))


def list_meshes(
    space: SearchSpace, options: Options, *, is_late: Callable[[], bool] = lambda: False
) -> tuple[tuple[Mesh, ...], bool]:
    """The meshes of the space that the options allow, in a fixed order, and whether these are all.

    Once it is late no more are listed; what uses most devices is listed first.

    Raises: InfeasibleError, naming the numbers that would work, if there is none.
    """
    meshes, is_all = _meshes(space, options, is_late=is_late)
    return (meshes, is_all) if meshes or not is_all else _explain_nothing(space, options, is_late=is_late)


def _meshes(space: SearchSpace, options: Options, *, is_late: Callable[[], bool]) -> tuple[tuple[Mesh, ...], bool]:
    counts = device_counts(space)
    degrees = {degrees for count in counts for degrees in degrees_of(space, options, n_devices=count)}
    listed: dict[tuple[int, int, int], tuple[Mesh, ...]] = {}
    for tp, pp, dp in sorted(degrees, key=lambda own: (-prod(own), own)):
        if is_late():
            break
        listed[tp, pp, dp] = tuple(meshes_of(space, options, tp=tp, pp=pp, dp=dp))
    return tuple(mesh for own in sorted(listed) for mesh in listed[own]), len(listed) == len(degrees)


def degrees_of(space: SearchSpace, options: Options, *, n_devices: int) -> Iterator[tuple[int, int, int]]:
    """(tp, pp, dp) that use exactly `n_devices`."""
    fix = {name: fixed_int(options, name) for name in ("tp", "pp", "dp")}
    fewest = 1 if fixed(options, "grad_compression") in (None, "none") else 2
    for tp in legal_tensor_degrees(space, options):
        for pp in divisors(n_devices // tp) if n_devices % tp == 0 else ():
            dp = n_devices // tp // pp
            allowed = all(fix[name] in (None, degree) for name, degree in (("tp", tp), ("pp", pp), ("dp", dp)))
            if allowed and dp >= fewest and pp <= space.n_pieces and space.global_batch % dp == 0:
                yield tp, pp, dp


def deeper_meshes(space: SearchSpace, options: Options, *, near: Mesh) -> Iterator[Mesh]:
    """Meshes like `near`, a pipeline of the space, with more stages per rank than that has; see `deeper_pipelines`.

    They have its devices, tensor parallelism, micro-batch size and ZeRO stage, and as many ranks in a pipeline or twice
    as many. Where the number of stages per rank is fixed, there are none: the space then has them.
    """
    if fixed(options, "stages_per_rank") is not None:
        return
    wide = replace(space, max_chunks=DEEPER_CHUNKS, max_interleaved_stages=DEEPER_STAGES)
    for tp, pp, dp in degrees_of(wide, options, n_devices=near.n_devices):
        if tp != near.tp or pp not in (near.pp, 2 * near.pp):
            continue
        for mesh in meshes_of(wide, options, tp=tp, pp=pp, dp=dp):
            if _kind(mesh) == _kind(near) and mesh.schedule == "interleaved" and is_deeper(mesh, space):
                yield replace(mesh, keeps_attention=near.keeps_attention)


def _kind(mesh: Mesh) -> tuple[object, ...]:
    return mesh.sharding, mesh.execution, mesh.micro_batch_size, mesh.zero_stage, mesh.cuda_graph


def is_deeper(mesh: Mesh, space: SearchSpace | None = None) -> bool:
    """Whether a mesh has more stages per rank than the space has where none are fixed, or than any space by default."""
    most = (space.max_chunks, space.max_interleaved_stages) if space else (MAX_CHUNKS, MAX_INTERLEAVED_STAGES)
    return mesh.n_chunks > 1 and (mesh.n_chunks > most[0] or mesh.n_stages > most[1])


def legal_tensor_degrees(space: SearchSpace, options: Options) -> tuple[int, ...]:
    """Tensor-parallel degrees that exist for the model and stay on the links of a host (a fixed one may leave them)."""
    is_free = fixed(options, "tp") is not None
    near = tensor_degrees(n_devices_per_host=space.n_devices_per_host, n_on_links=space.n_on_links)
    return tuple(tp for tp, keys in space.shardings if keys and (is_free or tp in near))


def meshes_of(space: SearchSpace, options: Options, *, tp: int, pp: int, dp: int) -> Iterator[Mesh]:
    """The meshes of these degrees that the options allow, in a fixed order."""
    keys = dict(space.shardings)[tp]
    batches = micro_batch_sizes(space, options, dp=dp)
    zeros = zero_choices(space, options, tp=tp, dp=dp)
    codes = space.generated if tp == pp == 1 else (False,)
    choices = product(keys, batches, zeros, space.executions, codes)
    recompute = fixed(options, "recompute")
    keeps_attention = space.must_keep_attention and recompute != "none"
    counts = {size: space.global_batch // dp // size for size in batches}
    schedules = {n: _schedule_choices(space, options, pp=pp, n_micro_batches=n) for n in counts.values()}

    @cache
    def ways(
        own: tuple[tuple[str, int], ...], zero_stage: int, compiles: bool, is_own: bool
    ) -> tuple[tuple[str, int, bool, bool], ...]:
        """Of schedules with stages per rank those possible, with whether attention is kept, and passes are a graph."""
        return tuple(
            (schedule, n_chunks, keeps_attention and not splits_backward(schedule), is_captured)
            for schedule, n_chunks in own
            if is_possible(schedule, zero_stage=zero_stage, recompute=recompute, compiles=compiles)
            for is_captured in graphs_of_schedule(space, options, tp=tp, is_own=is_own, schedule=schedule)
        )

    for sharding, micro_batch_size, (zero_stage, shard_degree), execution, generated in choices:
        n_micro_batches = counts[micro_batch_size]
        if (zero_stage, shard_degree) not in canonical(zeros, n_micro_batches=n_micro_batches):
            continue
        is_own = tp == pp == 1 and not generated
        possible = ways(schedules[n_micro_batches], zero_stage, execution.compile, is_own)
        for schedule, n_chunks, is_keeping, is_captured in possible:
            yield Mesh(
                pp=pp,
                dp=dp,
                tp=tp,
                zero_stage=zero_stage,
                zero_shard_degree=shard_degree,
                micro_batch_size=micro_batch_size,
                n_micro_batches=n_micro_batches,
                schedule=schedule,
                n_chunks=n_chunks,
                sharding=sharding,
                compile=execution.compile,
                memory_format=execution.memory_format,
                generated=generated,
                wraps_head=space.wraps_head and is_own,
                keeps_attention=is_keeping,
                cuda_graph=is_captured,
            )


def graphs_of_schedule(
    space: SearchSpace, options: Options, *, tp: int, is_own: bool, schedule: str
) -> tuple[bool, ...]:
    """Whether listed meshes have passes as a CUDA graph; not where the backward pass is split, which nobody tried."""
    if splits_backward(schedule):
        return () if fixed(options, "cuda_graph") == "on" else (False,)
    graphs = space.graphs_of(tp=tp, is_own=is_own)
    return graphs if len(graphs) < 2 or space.lists_plain else (True,)


def is_possible(schedule: str, *, zero_stage: int, recompute: str | None, compiles: bool) -> bool:
    """Whether a schedule goes with a ZeRO stage, the recomputation the user fixed, and compiled blocks.

    A split backward pass would recompute every block once for the inputs and again for each of its weights, and
    the gradients of weights belong to the gathered parameters, which ZeRO 3 has freed by then. The backward pass of a
    compiled block is one function.
    """
    keeps_whole = zero_stage <= MAX_SPLIT_ZERO_STAGE and recompute in (None, "none") and not compiles
    return keeps_whole or not splits_backward(schedule)


def micro_batch_sizes(space: SearchSpace, options: Options, *, dp: int) -> tuple[int, ...]:
    """Divisors of one rank's share of the batch, up to the largest allowed; exactly the fixed one if it is fixed."""
    sizes = _sizes_of(space.global_batch // dp)
    wanted, largest = fixed_int(options, "micro_batch"), options.max_micro_batch_size
    if wanted is not None:
        return tuple(size for size in sizes if size == wanted)
    return tuple(size for size in sizes if largest is None or size <= largest)


def _sizes_of(share: int) -> tuple[int, ...]:
    """Micro-batches that a rank's share of the batch can be cut into, the smallest first."""
    return tuple(size for size in divisors(share) if share // size <= MAX_MICRO_BATCHES)


def data_parallel_degrees(global_batch: int, *, n_devices: int, n_devices_per_host: int) -> tuple[int, ...]:
    """Degrees that some plan on the cluster may have and that divide the batch, ascending."""
    counts = device_counts_of(n_devices, n_devices_per_host=n_devices_per_host)
    return tuple(sorted({dp for n in counts for dp in divisors(n) if global_batch % dp == 0}))


def least_micro_batch_size(global_batch: int, *, dp_degrees: Iterable[int]) -> int:
    """The fewest samples of a micro-batch under any of these degrees, all of which divide the batch."""
    return min(_sizes_of(global_batch // dp)[0] for dp in dp_degrees)


def nearest_shared_batch(global_batch: int, *, n_devices: int) -> int | None:
    """The nearest batch that all devices share alike, in micro-batches at most twice as large as `MAX_MICRO_BATCHES`
    asks for; itself if it is one. None where it is further away than half of the batch.
    """
    below = global_batch // n_devices
    for distance in count():
        shares = (share for share in (below - distance, below + 1 + distance) if share > 0)
        for share in sorted(shares, key=lambda own: abs(own * n_devices - global_batch)):
            if 2 * abs(share * n_devices - global_batch) > global_batch:
                return None
            if _sizes_of(share)[0] <= 2 * -(-share // MAX_MICRO_BATCHES):
                return share * n_devices
    raise AssertionError("all are further away in the end")


def zero_choices(space: SearchSpace, options: Options, *, tp: int, dp: int) -> tuple[tuple[int, int], ...]:
    """(zero_stage, zero_shard_degree): over `dp`, or the ranks of a host or on its links (hybrid sharding)."""
    stages = {stage for stage in space.zero_stages if stage == 0 or dp > 1}
    near = dict.fromkeys((space.n_devices_per_host // tp, space.n_on_links // tp))
    shard_degrees = (dp, *(degree for degree in near if 1 < degree < dp and dp % degree == 0))
    choices = [(s, d) for s in sorted(stages) for d in ((1,) if s == 0 else shard_degrees)]
    zero, shard, compression = (
        fixed_int(options, "zero"),
        fixed_int(options, "shard"),
        fixed(options, "grad_compression"),
    )
    return tuple(
        (s, d)
        for s, d in choices
        if zero in (None, s) and shard in (None, d) and can_compress(compression, zero_stage=s, shard_degree=d, dp=dp)
    )


def canonical(zeros: tuple[tuple[int, int], ...], *, n_micro_batches: int) -> tuple[tuple[int, int], ...]:
    """Of `zero_choices` those that are plans of their own: of one micro-batch stage 2 is stage 1, if that is there."""
    if n_micro_batches > 1:
        return zeros
    return tuple((stage, degree) for stage, degree in zeros if stage != 2 or (1, degree) not in zeros)


def can_compress(compression: str | None, *, zero_stage: int, shard_degree: int, dp: int) -> bool:
    """Whether gradients can be compressed so: by PowerSGD where all ranks have all of them, else in one collective."""
    if compression in (None, "none"):
        return True
    return zero_stage == 0 if compression == "powersgd" else shard_degree in (1, dp)


def _schedule_choices(
    space: SearchSpace, options: Options, *, pp: int, n_micro_batches: int
) -> tuple[tuple[str, int], ...]:
    """(schedule, n_chunks) that exist for these numbers."""
    n_chunks = fixed_int(options, "stages_per_rank")
    if pp == 1:
        return (("1f1b", 1),) if n_chunks in (None, 1) else ()
    chunks = _numbers_of_chunks(space, n_chunks, pp=pp)
    choices: list[tuple[str, int]] = []
    if n_micro_batches >= pp:
        choices.append(("1f1b", 1))
    choices.append(("gpipe", 1))
    if n_micro_batches % pp == 0:
        choices.extend(("interleaved", c) for c in chunks)
    if n_micro_batches >= pp and 2 in chunks:
        choices.append(("zero_bubble_v", 2))
    wanted = fixed(options, "schedule")
    if wanted == PLAIN_SCHEDULE:
        wanted = plain_schedule(pp=pp, n_micro_batches=n_micro_batches)
    return tuple(
        (name, c) for name, c in choices if name in space.schedules and wanted in (None, name) and n_chunks in (None, c)
    )


def _numbers_of_chunks(space: SearchSpace, n_chunks: int | None, *, pp: int) -> tuple[int, ...]:
    """How many stages a rank may have, where it may have several; `n_chunks` is what the user fixed."""
    most = space.n_pieces // pp
    if n_chunks is not None:
        return (n_chunks,) if n_chunks <= most else ()
    most = min(most, space.max_chunks, space.max_interleaved_stages // pp)
    return (1, *(2**k for k in range(1, most.bit_length()) if 2**k <= most))


def plain_schedule(*, pp: int, n_micro_batches: int) -> str:
    """The one that `PLAIN_SCHEDULE` means: 1f1b would run fewer micro-batches than ranks in the order of gpipe."""
    return "1f1b" if n_micro_batches >= pp else "gpipe"


def _explain_nothing(space: SearchSpace, options: Options, *, is_late: Callable[[], bool]) -> NoReturn:
    """Raise an error that names the legal numbers: next to each fixed one, and of each degree."""
    legal_dp = [d for d in divisors(space.global_batch) if d <= space.n_devices]
    legal_tp = legal_tensor_degrees(space, replace(options, fix=()))
    place = f"within a host of {space.n_devices_per_host}"
    if space.n_on_links > space.n_devices_per_host:
        place = f"on the links of a host, which join {space.n_on_links} devices"
    tp_line = f"  legal tp (exists for the model, {place}): {_listed(legal_tp)}\n"
    fixes = ", ".join(f"{name}={value}" for name, value in options.fix) or "nothing"
    largest = "" if options.max_micro_batch_size is None else f" up to {options.max_micro_batch_size}"
    near_lines = list(_near_lines(space, options, is_late=is_late))
    fix = "take a value that is named instead of one that is fixed"
    if not near_lines:
        near = nearest_shared_batch(space.global_batch, n_devices=space.n_devices)
        is_other = near not in (None, space.global_batch)
        batch = f"take a global batch of {near}" if is_other else "change the global batch"
        fix = f"choose dp * tp * pp among {_listed(sorted(device_counts(space)))}, or {batch}"
    raise InfeasibleError(
        f"no mesh: global batch {space.global_batch} on {space.n_devices} devices, fixed: {fixes}\n"
        + "".join(f"  {line}\n" for line in near_lines)
        + f"  legal dp (divides the global batch): {_listed(legal_dp)}\n"
        + (tp_line if fixed(options, "tp") is None else "")
        + f"  legal pp: 1 to {space.n_pieces} (pieces the model can be cut into), with as many micro-batches\n"
        + (f"  no more pieces: {space.why_uncut}\n" if space.why_uncut else "")
        + f"  legal micro-batch: divisors of global batch / dp{largest}, at most {MAX_MICRO_BATCHES} of them a step\n"
        "  legal zero: 0 when dp = 1\n"
        f"  fix: {fix}"
    )


N_NEAR = 4  # legal values shown next to a fixed one


def _near_lines(space: SearchSpace, options: Options, *, is_late: Callable[[], bool]) -> Iterator[str]:
    """Per change of one thing that is enough: which values it may have. Of tp only the fixed one is in the space."""
    for name, value in options.fix:
        if name == "tp":
            continue
        freed = replace(options, fix=tuple(pair for pair in options.fix if pair[0] != name))
        meshes, _ = _meshes(space, freed, is_late=is_late)
        legal = {value_of_mesh(name, mesh) or "none" for mesh in meshes}
        if legal:
            yield f"instead of {name}={value}, with the rest as it is: {_nearest_text(legal, value)}"
    per_step = (fixed_int(options, "dp") or 1) * (fixed_int(options, "micro_batch") or 1)
    below = space.global_batch // per_step * per_step
    if below != space.global_batch:
        sizes = [str(size) for size in (below, below + per_step) if size > 0]
        yield f"or a global batch that dp x micro-batch = {per_step} divides: {' or '.join(sizes)}"


def _nearest_text(legal: set[str], wanted: str) -> str:
    if not all(value.isdecimal() for value in (*legal, wanted)):
        return ", ".join(sorted(legal))
    numbers = sorted(map(int, legal), key=lambda number: (abs(number - int(wanted)), number))
    return ", ".join(map(str, sorted(numbers[:N_NEAR])))


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
