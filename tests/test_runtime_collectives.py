"""Every conversion, forward and backward, on 2, 3 and 4 ranks against plain torch on the tensors of all ranks."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed.launch import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.runtime.tensor_parallel import collectives, vocabulary

# What each rank must hold, from the tensors of all ranks. Dims have 36 = 3 blocks x lcm(2, 3, 4) elements or 24.


def _whole(parts, dim, blocks):
    by_block = [torch.cat([part.chunk(blocks, dim)[block] for part in parts], dim) for block in range(blocks)]
    return torch.cat(by_block, dim)


def _part(whole, rank, n_ranks, dim, blocks):
    return torch.cat([block.chunk(n_ranks, dim)[rank] for block in whole.chunk(blocks, dim)], dim)


def _padded(part, rank, n_ranks, dim, blocks):
    zeros = torch.zeros_like(part)
    return _whole([part if other == rank else zeros for other in range(n_ranks)], dim, blocks)


EXPECTED = {
    "identity": lambda xs, rank, n, dim, blocks: xs[rank],
    "sum": lambda xs, rank, n, dim, blocks: sum(xs),
    "gather": lambda xs, rank, n, dim, blocks: _whole(xs, dim, blocks),
    "slice": lambda xs, rank, n, dim, blocks: _part(xs[rank], rank, n, dim, blocks),
    "reduce_scatter": lambda xs, rank, n, dim, blocks: _part(sum(xs), rank, n, dim, blocks),
    "pad": lambda xs, rank, n, dim, blocks: _padded(xs[rank], rank, n, dim, blocks),
    "first": lambda xs, rank, n, dim, blocks: xs[rank] if rank == 0 else torch.zeros_like(xs[rank]),
}
PLAIN = {
    "copy_to_tp": ("identity", "sum"),
    "all_reduce": ("sum", "identity"),
    "all_reduce_both": ("sum", "sum"),
    "first_rank_only": ("first", "identity"),
    "first_rank_only_both": ("first", "first"),
    "keep_first_rank_grad": ("identity", "first"),
}
ALONG_DIM = {
    "all_gather": ("gather", "slice"),
    "all_gather_reduce_grad": ("gather", "reduce_scatter"),
    "reduce_scatter": ("reduce_scatter", "gather"),
    "shard": ("slice", "gather"),
    "shard_partial_grad": ("slice", "pad"),
    "pad_to_partial": ("pad", "slice"),
}


def _expected(movement, xs, rank, n, dim, blocks, size=None):
    """What a rank must hold; with `size` whole dims grow by zeros before, or lose what is beyond `size` after."""
    if size is None:
        return EXPECTED[movement](xs, rank, n, dim, blocks)
    n_missing = -size % n
    if movement in ("slice", "reduce_scatter"):
        zeros = torch.zeros_like(xs[0].narrow(dim, 0, n_missing))
        return EXPECTED[movement]([torch.cat([x, zeros], dim) for x in xs], rank, n, dim, blocks)
    return EXPECTED[movement](xs, rank, n, dim, blocks).narrow(dim, 0, size)


def _tensors(n_ranks, shape, seed):
    """Transposed, so that no input or gradient is contiguous."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(*reversed(shape), generator=generator, dtype=torch.float64).permute(2, 1, 0) for _ in range(n_ranks)
    ]


def _check(function, xs, gradients_of, forward, backward, rank, n, dim, blocks, size=None):
    x = xs[rank].detach().requires_grad_()
    y = function(x)
    torch.testing.assert_close(y, _expected(forward, xs, rank, n, dim, blocks, size), rtol=0, atol=1e-12)
    gradients = gradients_of(y.shape)
    (gradient,) = torch.autograd.grad(y, x, gradients[rank])
    expected = _expected(backward, gradients, rank, n, dim, blocks, size)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def _check_conversions(tp):
    rank, n = tp.rank(), tp.size()
    xs = _tensors(n, (36, 24, 36), seed=1)
    gradients_of = lambda shape: _tensors(n, tuple(shape), seed=2)
    for name, (forward, backward) in PLAIN.items():
        function = functools.partial(getattr(collectives, name), tp=tp)
        _check(function, xs, gradients_of, forward, backward, rank, n, 0, 1)
    for name, (forward, backward) in ALONG_DIM.items():
        for dim, blocks in ((0, 1), (1, 1), (-1, 1), (1, 2), (-1, 3), (0, 3)):
            function = functools.partial(getattr(collectives, name), dim=dim, tp=tp, blocks=blocks)
            _check(function, xs, gradients_of, forward, backward, rank, n, dim % 3, blocks)


def _check_padded_conversions(tp):
    """Dims of 13 and 5: of 4 ranks the last one holds one element of the 13, and only padding of the 5."""
    rank, n = tp.rank(), tp.size()
    gradients_of = lambda shape: _tensors(n, tuple(shape), seed=9)
    for size in (13, 5):
        for name, (forward, backward) in ALONG_DIM.items():
            for dim in (0, 1, -1):
                shape = [3, 4, 2]
                is_whole = forward in ("slice", "reduce_scatter")
                shape[dim] = size if is_whole else -(-size // n)
                function = functools.partial(getattr(collectives, name), dim=dim, tp=tp, size=size)
                xs = _tensors(n, tuple(shape), seed=8)
                _check(function, xs, gradients_of, forward, backward, rank, n, dim % 3, 1, size)


def _check_padded_vocabulary(tp):
    """23 and 5 classes: padding, whatever it holds, changes no loss, and gets a gradient of exactly zero."""
    rank, n = tp.rank(), tp.size()
    for n_classes in (23, 5):
        n_local = -(-n_classes // n)
        n_real = min(max(n_classes - rank * n_local, 0), n_local)
        logits, table = (t[:, :, 0] for t in _tensors(2, (14, n_classes, 1), seed=10))
        targets = torch.arange(14) * 7 % n_classes
        targets[3] = -100
        garbage = torch.full((14, n * n_local - n_classes), 50.0, dtype=torch.float64)
        for label_smoothing in (0.0, 0.1):
            whole = logits.clone().requires_grad_()
            expected = F.cross_entropy(whole, targets, label_smoothing=label_smoothing)
            (expected_gradient,) = torch.autograd.grad(expected, whole)
            local = _part(torch.cat([logits, garbage], 1), rank, n, 1, 1).requires_grad_()
            found = vocabulary.vocab_parallel_cross_entropy(
                local, targets, tp, label_smoothing=label_smoothing, n_classes=n_classes
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
            (gradient,) = torch.autograd.grad(found, local)
            expected_part = expected_gradient[:, rank * n_local : rank * n_local + n_real]
            torch.testing.assert_close(gradient[:, :n_real], expected_part, rtol=0, atol=1e-12)
            assert (gradient[:, n_real:] == 0).all()
        ids = torch.arange(n_classes).flip(0)
        rows = _part(torch.cat([table, garbage], 1), rank, n, 1, 1).T.contiguous().requires_grad_()
        embedded = collectives.all_reduce(vocabulary.vocab_parallel_embedding(ids, rows, tp), tp)
        torch.testing.assert_close(embedded, table.T[ids], rtol=0, atol=0)
        (gradient,) = torch.autograd.grad(embedded.sum(), rows)
        assert (gradient[:n_real] != 0).all() and (gradient[n_real:] == 0).all()


def _check_all_to_all(tp):
    rank, n = tp.rank(), tp.size()
    (whole, weight) = _tensors(2, (12, 24, 12), seed=3)
    for from_dim, to_dim in ((0, 1), (1, 0), (1, -1), (-1, 1)):
        x = _part(whole, rank, n, from_dim, 1).requires_grad_()
        y = collectives.all_to_all(x, from_dim, to_dim, tp)
        torch.testing.assert_close(y, _part(whole, rank, n, to_dim, 1), rtol=0, atol=0)
        (gradient,) = torch.autograd.grad(y, x, _part(weight, rank, n, to_dim, 1))
        torch.testing.assert_close(gradient, _part(weight, rank, n, from_dim, 1), rtol=0, atol=0)


def _check_embedding(tp):
    rank, n = tp.rank(), tp.size()
    (weight, gradient, _) = (t[:, :, 0] for t in _tensors(3, (24, 5, 1), seed=4))
    ids = torch.arange(24).view(4, 6).flip(0)
    for padding_idx in (None, 13):
        whole = weight.clone().requires_grad_()
        expected = F.embedding(ids, whole, padding_idx=padding_idx)
        (expected_gradient,) = torch.autograd.grad(expected, whole, gradient[ids])
        local = _part(weight, rank, n, 0, 1).requires_grad_()
        partial = vocabulary.vocab_parallel_embedding(ids, local, tp, padding_idx=padding_idx)
        found = collectives.all_reduce(partial, tp)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        (local_gradient,) = torch.autograd.grad(found, local, gradient[ids])
        torch.testing.assert_close(local_gradient, _part(expected_gradient, rank, n, 0, 1), rtol=0, atol=0)


def _check_cross_entropy(tp):
    rank, n = tp.rank(), tp.size()
    logits = _tensors(1, (2, 7, 24), seed=5)[0].contiguous()
    targets = torch.arange(14).view(2, 7) * 7 % 24
    targets[0, 3] = targets[1, 1] = -100
    for reduction in ("mean", "sum", "none"):
        for label_smoothing in (0.0, 0.1):
            options = {"reduction": reduction, "label_smoothing": label_smoothing}
            whole = logits.clone().requires_grad_()
            expected = F.cross_entropy(whole.view(14, 24), targets.view(14), **options).view_as(
                targets if reduction == "none" else torch.zeros(())
            )
            (expected_gradient,) = torch.autograd.grad(expected.square().sum(), whole)
            local = _part(logits, rank, n, -1, 1).requires_grad_()
            found = vocabulary.vocab_parallel_cross_entropy(local, targets, tp, **options)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
            (gradient,) = torch.autograd.grad(found.square().sum(), local)
            torch.testing.assert_close(gradient, _part(expected_gradient, rank, n, -1, 1), rtol=0, atol=1e-12)
    other = vocabulary.vocab_parallel_cross_entropy(local, torch.where(targets < 0, 5, targets), tp, ignore_index=5)
    torch.testing.assert_close(
        other, F.cross_entropy(logits.view(14, 24), torch.where(targets < 0, 5, targets).view(14), ignore_index=5)
    )
    half = vocabulary.vocab_parallel_cross_entropy(local.bfloat16(), targets, tp)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), F.cross_entropy(logits.view(14, 24), targets.view(14)), rtol=0.02, atol=0)


def _check_sequence_parallel_mlp(tp):
    """Column- then row-parallel linear on a sequence shard: the usual chain of three conversions."""
    rank, n = tp.rank(), tp.size()
    x, up, down, gradient = (t[0] for t in _tensors(4, (1, 12, 12), seed=6))
    whole = [t.clone().requires_grad_() for t in (x, up, down)]
    expected = torch.autograd.grad(F.gelu(whole[0] @ whole[1]) @ whole[2], whole, gradient)
    local = [_part(t, rank, n, dim, 1).requires_grad_() for t, dim in ((x, 0), (up, 1), (down, 0))]
    hidden = F.gelu(collectives.all_gather_reduce_grad(local[0], 0, tp) @ local[1])
    y = collectives.reduce_scatter(hidden @ local[2], 0, tp)
    found = torch.autograd.grad(y, local, _part(gradient, rank, n, 0, 1))
    for found_gradient, expected_gradient, dim in zip(found, expected, (0, 1, 0), strict=True):
        torch.testing.assert_close(found_gradient, _part(expected_gradient, rank, n, dim, 1), rtol=0, atol=1e-12)


def _check_compiled(tp):
    """torch.compile takes every conversion without a graph break, and values and gradients stay the same."""
    (leaf,) = _tensors(1, (12, 24, 12), seed=7)
    ids = torch.arange(24).view(4, 6)

    def every_conversion(x):
        rows = vocabulary.vocab_parallel_embedding(ids, x[0], tp)
        yield vocabulary.vocab_parallel_cross_entropy(rows, ids, tp, label_smoothing=0.1)
        yield collectives.all_to_all(2 * x, 1, 2, tp)
        for name in PLAIN:
            yield getattr(collectives, name)(2 * x, tp)
        padded_rows = rows[..., :5].reshape(-1, 5)
        yield vocabulary.vocab_parallel_cross_entropy(padded_rows, ids.flatten() % 9, tp, n_classes=9)
        for name, (forward, _) in ALONG_DIM.items():
            for dim, blocks in ((1, 1), (2, 3)):
                yield getattr(collectives, name)(2 * x, dim, tp, blocks)
            odd = 2 * x[:, :11] if forward in ("slice", "reduce_scatter") else 2 * x[:, :6]
            yield getattr(collectives, name)(odd, 1, tp, size=11)

    def function(x):
        return [(3 * y).sin().square().sum() for y in every_conversion(x)]

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    x = leaf.contiguous().requires_grad_()
    for expected, found in zip(function(x), compiled(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        expected_gradient, gradient = (torch.autograd.grad(y, x, retain_graph=True)[0] for y in (expected, found))
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-9)


def _worker(degrees):
    for n_ranks in degrees:
        tp = dist.new_group(list(range(n_ranks)))
        if dist.get_rank() < n_ranks:
            for check in (
                _check_conversions,
                _check_padded_conversions,
                _check_padded_vocabulary,
                _check_all_to_all,
                _check_embedding,
                _check_cross_entropy,
                _check_sequence_parallel_mlp,
            ):
                check(tp)
            if n_ranks == 2:
                _check_compiled(tp)
        dist.barrier()
    return True


@pytest.mark.parametrize(
    "degrees", [(2,), *(pytest.param(several, marks=pytest.mark.nightly) for several in ((2, 4), (3,)))], ids=str
)
def test_every_conversion_moves_values_and_gradients_as_its_name_says_on_several_ranks(degrees):
    n_ranks = max(degrees)
    assert run_ranks(_worker, n_ranks, degrees) == [True] * n_ranks


class _Made(TorchDispatchMode):
    """The dtypes of the tensors of a size that are made inside it, in order."""

    def __init__(self, size):
        super().__init__()
        self.size, self.dtypes = size, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        given = [x.data_ptr() for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        if isinstance(found, torch.Tensor) and found.numel() == self.size and found.data_ptr() not in given:
            self.dtypes.append(found.dtype)
        return found


def test_a_split_loss_of_16_bit_logits_makes_one_wide_tensor_of_their_size_at_a_time():
    logits = torch.randn(6, 40).bfloat16().requires_grad_()
    with _Made(240) as forward:
        loss = vocabulary.vocab_parallel_cross_entropy(logits, torch.arange(6), None)
    with _Made(240) as backward:
        loss.backward()
    assert forward.dtypes == [torch.float32]
    assert backward.dtypes == [torch.float32, torch.bfloat16]


def test_conversions_without_a_group_are_the_identity():
    x = torch.randn(4, 6, requires_grad=True)
    for name in PLAIN:
        assert getattr(collectives, name)(x, None) is x
    for name in ALONG_DIM:
        assert getattr(collectives, name)(x, 0, None) is x
    assert collectives.all_to_all(x, 0, 1, None) is x
    targets = torch.tensor([0, 5, 2, -100])
    found = vocabulary.vocab_parallel_cross_entropy(x, targets, None)
    torch.testing.assert_close(found, F.cross_entropy(x, targets))
