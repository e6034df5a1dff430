"""The chunked loss against the whole one: fp64, loss and all gradients, and what is kept for the backward pass."""

from __future__ import annotations

import weakref

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from autoplan.runtime.stages import chunked_loss, compiled  # noqa: E402
from autoplan.runtime.stages.chunked_loss import DeferredProduct, defer_products, deferred_linear, whole_logits  # noqa: E402
from autoplan.runtime.tensor_parallel.vocabulary import vocab_parallel_cross_entropy  # noqa: E402

N_SAMPLES, N_PLACES, WIDTH, N_CLASSES = 3, 7, 5, 11
LOSSES = {
    "flat": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
    "shifted": lambda logits, targets: F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, N_CLASSES), targets[:, 1:].reshape(-1)
    ),
    "summed": lambda logits, targets: F.cross_entropy(logits.reshape(-1, N_CLASSES), targets.view(-1), reduction="sum"),
    "smoothed": lambda logits, targets: nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=0)(
        logits.view(-1, N_CLASSES), targets.view(-1).clamp(min=0)
    ),
    "twice": lambda logits, targets: 3 * LOSSES["flat"](logits, targets) + LOSSES["shifted"](logits, targets),
    "of a rank": lambda logits, targets: vocab_parallel_cross_entropy(logits, targets, None, label_smoothing=0.1),
    "padded": lambda logits, targets: vocab_parallel_cross_entropy(logits, targets % 9, None, n_classes=9),
}


def example(*, bias: bool):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N_SAMPLES, N_PLACES, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(N_CLASSES, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    bias_of = torch.randn(N_CLASSES, generator=generator, dtype=torch.float64, requires_grad=True) if bias else None
    targets = torch.randint(0, N_CLASSES, (N_SAMPLES, N_PLACES), generator=generator)
    targets[0, :5] = -100
    return [t for t in (x, weight, bias_of) if t is not None], targets


def gradients_of(loss, tensors, *, scale=0.37):
    return loss.detach(), *torch.autograd.grad(loss * scale, tensors)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("slice_rows", [1, 4, 100])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_the_whole_logits(name, slice_rows, bias) -> None:
    tensors, targets = example(bias=bias)
    deferred = deferred_linear(*tensors, slice_rows=slice_rows)
    assert isinstance(deferred, DeferredProduct) and deferred.shape == (N_SAMPLES, N_PLACES, N_CLASSES)
    found = gradients_of(LOSSES[name](deferred, targets), tensors)
    expected = gradients_of(LOSSES[name](F.linear(*tensors), targets), tensors)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_only_what_is_as_large_as_the_hidden_states_and_the_weight_is_kept() -> None:
    tensors, targets = example(bias=True)
    saved = []  # what the loss of a slice saves is gone when the slice is
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(weakref.ref(t)) or t, lambda t: t):
        loss = LOSSES["summed"](deferred_linear(*tensors, slice_rows=4), targets)
    kept = [found.numel() for found in (reference() for reference in saved) if found is not None]
    assert loss.requires_grad and sorted(kept) == sorted(tensor.numel() for tensor in tensors)


OTHER_USES = {
    "arithmetic": lambda logits: (logits * 2).sum(),
    "another dim": lambda logits: logits.view(-1, N_CLASSES * N_PLACES).square().sum(),
    "some classes": lambda logits: logits[..., :3].sum(),
    "rows of losses": lambda logits: F.cross_entropy(
        logits.flatten(0, 1), torch.arange(N_SAMPLES * N_PLACES) % N_CLASSES, reduction="none"
    ).sum(),
    "classes first": lambda logits: F.cross_entropy(
        logits.transpose(1, 2), torch.arange(N_SAMPLES * N_PLACES).view(N_SAMPLES, -1) % N_CLASSES
    ),
    "weighted": lambda logits: F.cross_entropy(
        logits.flatten(0, 1),
        torch.arange(N_SAMPLES * N_PLACES) % N_CLASSES,
        torch.arange(N_CLASSES, dtype=torch.float64),
    ),
    "a mask": lambda logits: logits[torch.arange(N_SAMPLES) > 0].sum(),
    "a sum of rows": lambda logits: torch.stack([logits, logits]).logsumexp(-1).sum(),
}


@pytest.mark.parametrize("name", OTHER_USES)
def test_whatever_else_reads_the_logits_gets_them_whole(name) -> None:
    tensors, _ = example(bias=True)
    found = gradients_of(OTHER_USES[name](deferred_linear(*tensors, slice_rows=4)), tensors)
    expected = gradients_of(OTHER_USES[name](F.linear(*tensors)), tensors)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_a_hook_on_the_logits_runs_once_before_their_gradient_is_handed_on() -> None:
    tensors, targets = example(bias=False)
    order = []
    deferred = deferred_linear(*tensors, slice_rows=4)
    deferred.register_hook(lambda gradient: order.append("logits"))
    tensors[1].register_hook(lambda gradient: order.append("weight"))
    LOSSES["flat"](deferred, targets).backward()
    assert order == ["logits", "weight"]


def test_a_loss_without_gradients_is_computed_in_slices_too() -> None:
    tensors, targets = example(bias=True)
    with torch.no_grad():
        deferred = deferred_linear(*tensors, slice_rows=4)
        assert not deferred.requires_grad
        torch.testing.assert_close(LOSSES["flat"](deferred, targets), LOSSES["flat"](F.linear(*tensors), targets))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bits_are_as_close_as_those_of_the_whole_loss(dtype) -> None:
    """Also under a loss scale, and with as many slices as rows."""
    tensors, targets = example(bias=False)
    exact = gradients_of(LOSSES["flat"](F.linear(*tensors), targets), tensors, scale=1.0)[1:]
    halves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    for slice_rows in (1, 100):
        deferred = deferred_linear(*halves, slice_rows=slice_rows)
        found = gradients_of(LOSSES["flat"](deferred.float(), targets), halves, scale=2.0**10)[1:]
        whole = gradients_of(LOSSES["flat"](F.linear(*halves).float(), targets), halves, scale=2.0**10)[1:]
        for one, other, true in zip(found, whole, exact, strict=True):
            size = true.abs().max()
            off = (one.double() / 2**10 - true).abs().max() / size
            assert off <= 2 * max((other.double() / 2**10 - true).abs().max() / size, 2 * torch.finfo(dtype).eps)


def test_a_head_that_is_deferred_is_whole_again_for_whoever_asks() -> None:
    head = nn.Sequential(nn.Linear(WIDTH, N_CLASSES)).double()
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    expected = head(x)
    defer_products(head, slice_rows=4, is_compiled=False)
    found = head(x)
    assert isinstance(found, DeferredProduct)
    torch.testing.assert_close(whole_logits({"logits": [found]})["logits"][0], expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo, of autograd functions
@pytest.mark.parametrize("name", ["flat", "of a rank"])
def test_the_loss_of_a_slice_is_compiled_once_for_slices_of_one_size(monkeypatch, name) -> None:
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled, "backend_of", lambda device: backend)
    tensors, targets = example(bias=False)
    torch.compiler.reset()
    deferred = deferred_linear(*tensors, slice_rows=7, is_compiled=True)
    loss = LOSSES[name](deferred, targets)
    torch.testing.assert_close(loss, LOSSES[name](F.linear(*tensors), targets))
    assert len(graphs) == 1
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_cast_of_the_logits_is_compiled_with_the_loss(monkeypatch) -> None:
    dtypes = []

    def backend(graph, inputs):
        dtypes.extend(value.dtype for value in inputs)
        return graph.forward

    monkeypatch.setattr(compiled, "backend_of", lambda device: backend)
    tensors, targets = example(bias=False)
    x, weight, *_ = (None if tensor is None else tensor.detach().bfloat16().requires_grad_() for tensor in tensors)
    torch.compiler.reset()
    LOSSES["flat"](deferred_linear(x, weight, slice_rows=7, is_compiled=True).float(), targets)
    assert torch.bfloat16 in dtypes and torch.float32 not in dtypes
    torch.compiler.reset()


def test_a_hugging_face_model_that_computes_its_own_loss_computes_it_in_slices() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=23)
    model = transformers.LlamaForCausalLM(config).double()
    ids = torch.arange(24).view(2, 12) % 23
    labels = ids.masked_fill(ids % 5 == 0, -100)
    parameters = list(model.parameters())
    expected = gradients_of(model(input_ids=ids, labels=labels).loss, parameters)
    defer_products(model.lm_head, slice_rows=5, is_compiled=False)
    outputs = model(input_ids=ids, labels=labels)
    assert isinstance(outputs.logits, DeferredProduct)
    for one, other in zip(gradients_of(outputs.loss, parameters), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)  # its loss is in float32


def test_nothing_of_a_slice_outlives_it(monkeypatch) -> None:
    real, kept = chunked_loss._loss_and_gradient, []

    def seen(loss_of, logits, *args, **kwargs):
        assert all(reference() is None for reference in kept)
        loss, gradient = real(loss_of, logits, *args, **kwargs)
        kept.extend(map(weakref.ref, (logits, gradient)))
        return loss, gradient

    monkeypatch.setattr(chunked_loss, "_loss_and_gradient", seen)
    (x, weight), targets = example(bias=False)
    gradients_of(LOSSES["flat"](deferred_linear(x, weight, slice_rows=4), targets), (x, weight))
    assert len(kept) == 2 * 6  # 21 rows
