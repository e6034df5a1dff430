"""What reducing the gradients of a segment costs where they are compressed: time, memory, and bytes on the wire.

N elements of w bytes (those of the reduction without compression), d ranks that share them (1 under ZeRO 0).

**bf16**    sends 2 N bytes instead of w N, beside other work as before
    kernels   (w + 2) N to round them, (w + 2) N / d to widen what a rank keeps; 2 x 2 N more under ZeRO 0, to divide
    memory    2 N + 2 N / d (2 N under ZeRO 0) while they are reduced

**PowerSGD** of rank r sends each matrix M: [n, m] with 2 (n + m) r < n m as P: [n, r] and Q: [m, r], r at most n and m;
the other elements, u in all, as they are. Three all-reduces, of w u, w sum(n r) and w sum(m r) bytes.
    kernels   8 w N         the error of the last step added, a copy kept, the error of this step
              6 w u         what is not compressed, into a tensor of its own and back
              3 products    M Q, M^T P and P Q^T: each M once, or 2 n m r FLOPs of fp32
              launches      `n_launches`
    memory    w N + w sum((n + m) r)     errors, P and Q, all the time
              2 w N + w u                copy, new errors and what is not compressed, while they are reduced
torch's hook waits for the device at the end of each group, so nothing runs beside it: all of its time comes once per
step. What orthogonalization computes is left out, its launches are not; those of a QR factorization are a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoplan.cost.op_time import peak_flops_per_s
from autoplan.hardware import Device
from autoplan.parallel_plan import Mesh

WIRE_BYTES = 2  # of an element in bfloat16
MIN_RATE = 2  # torch compresses a matrix when that makes it smaller by more than this
N_ERROR_PASSES = 8  # over all elements: 3 to add the error, 2 to copy, 3 for the new error
N_WHOLE_PASSES = 6  # over what is not compressed: 2 to pack, 2 to divide, 2 to unpack
N_PRODUCTS = 3
N_GROUP_LAUNCHES = 6  # of a group, besides collectives
N_COLLECTIVES = 3
N_NARROW_LAUNCHES = 3
LARGEST_GRAM_SCHMIDT_RANK = 2  # torch takes a QR factorization from there on

Matrix = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Compression:
    """How gradients are compressed: "none", "bf16", or "powersgd" with the rank of P and Q."""

    name: str = "none"
    rank: int | None = None

    def over(self, *, n_shards: int, n_replicas: int) -> Compression:
        """What is left of it where gradients are reduced over so many ranks.

        PowerSGD needs all gradients on all of them, bf16 all ranks in one collective.
        """
        is_possible = n_shards == 1 or (self.name == "bf16" and n_replicas == 1)
        return self if n_shards * n_replicas > 1 and is_possible else NO_COMPRESSION

    def under(self, mesh: Mesh) -> Compression:
        """Likewise on a mesh."""
        return self.over(n_shards=mesh.zero_shard_degree, n_replicas=mesh.dp // mesh.zero_shard_degree)


NO_COMPRESSION = Compression()


@dataclass(frozen=True, slots=True)
class CompressedReduction:
    """Beside the collectives that any reduction of `wire_bytes` takes.

    Attributes:
        wire_bytes: of the tensors that are reduced, in order.
        kernels_s: on the device.
        host_s: to launch kernels, outside of modules and of autograd.
        state_bytes: all the time.
        reducing_bytes: while gradients are reduced.
    """

    wire_bytes: tuple[int, ...]
    kernels_s: float
    host_s: float
    state_bytes: int
    reducing_bytes: int


def narrow_reduction(
    n_elements: int, *, item_bytes: int, n_shards: int, device: Device, mixed_fraction: float
) -> CompressedReduction:
    """Of gradients in bf16; a kernel over two dtypes runs at `mixed_fraction` of the rate of others."""
    n_kept = -(-n_elements // n_shards)
    divided_bytes = 2 * WIRE_BYTES * n_elements if n_shards == 1 else 0
    cast_bytes = (item_bytes + WIRE_BYTES) * (n_elements + n_kept) / mixed_fraction
    moved_s = (cast_bytes + divided_bytes) / device.copy_bytes_per_s
    return CompressedReduction(
        wire_bytes=(WIRE_BYTES * n_elements,),
        kernels_s=moved_s + N_NARROW_LAUNCHES * device.kernel_s,
        host_s=device.launch_s * N_NARROW_LAUNCHES,
        state_bytes=0,
        reducing_bytes=WIRE_BYTES * (n_elements + (n_kept if n_shards > 1 else 0)),
    )


def power_sgd_reduction(
    matrices: Sequence[Matrix], *, item_bytes: int, rank: int, device: Device
) -> CompressedReduction:
    """Of the gradients of one group by PowerSGD; `matrices` are (first dim, all others) of its parameters."""
    compressed = [(n, m, min(n, m, rank)) for n, m in matrices if is_compressed((n, m), rank)]
    n_elements = sum(n * m for n, m in matrices)
    n_whole = n_elements - sum(n * m for n, m, _ in compressed)
    p_elements, q_elements = sum(n * r for n, _, r in compressed), sum(m * r for _, m, r in compressed)
    bytes_per_s = device.copy_bytes_per_s
    flops_per_s = peak_flops_per_s(device, "fp32") * device.matmul_efficiency
    passes_s = item_bytes * (N_ERROR_PASSES * n_elements + N_WHOLE_PASSES * n_whole) / bytes_per_s
    products_s = N_PRODUCTS * sum(
        max(item_bytes * n * m / bytes_per_s, 2 * n * m * r / flops_per_s) for n, m, r in compressed
    )
    launches = n_launches(r for _, _, r in compressed)
    return CompressedReduction(
        wire_bytes=tuple(item_bytes * count for count in (n_whole, p_elements, q_elements)),
        kernels_s=passes_s + products_s + launches * device.kernel_s,
        host_s=device.launch_s * launches + N_COLLECTIVES * device.collective_launch_s,
        state_bytes=item_bytes * (n_elements + p_elements + q_elements),
        reducing_bytes=item_bytes * (2 * n_elements + n_whole),
    )


def is_compressed(matrix: Matrix, rank: int) -> bool:
    """Whether PowerSGD sends P and Q of a matrix."""
    n, m = matrix
    return MIN_RATE * (n + m) * min(n, m, rank) < n * m


def n_launches(ranks: Iterable[int]) -> int:
    """Kernels of a group whose compressed matrices have these ranks; P and Q of each are orthogonalized.

    Gram-Schmidt takes 3 for each column (norm, sum, quotient) and 4 to take it out of those behind it.
    """
    return N_GROUP_LAUNCHES + sum(N_PRODUCTS + 2 * _orthogonalizing(rank) for rank in ranks)


def _orthogonalizing(rank: int) -> int:
    return 3 * rank + 4 * (rank - 1) if rank <= LARGEST_GRAM_SCHMIDT_RANK else 2 * rank
