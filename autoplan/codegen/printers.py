"""Operators whose public names take other arguments than ATen's, or sizes that differ on each rank."""

from __future__ import annotations

from dataclasses import replace

from autoplan.codegen.call import Call, Printer, function, indexed, keyworded
from autoplan.equations import argument
from autoplan.graph import Ref


def split(call: Call) -> str:
    """Pieces of the local size; along a dim that is not split that is the global one."""
    dim = argument(call.op, 2, "dim", 0)
    size = call.op.args[1]
    is_even = len({spec.shape for spec in call.op.outputs}) == 1
    piece = call.text(call.result.shape[dim]) if is_even else call.text(size)
    return f"{call.operands[0]}.split({piece}, dim={dim})"


def chunk(call: Call) -> str:
    """x.chunk(n, dim)."""
    dim = argument(call.op, 2, "dim", 0)
    return f"{call.operands[0]}.chunk({call.op.args[1]}, dim={dim})"


def cast(call: Call) -> str:
    """x.to(dtype)."""
    return f"{call.operands[0]}.to({call.text(call.op.args[1])})"


def to_copy(call: Call) -> str:
    """x.to(dtype=..., device=...)."""
    keywords = [text for text in call.keywords() if text.startswith(("dtype=", "device="))]
    return f"{call.operands[0]}.to({', '.join(keywords)})"


def embedding(call: Call) -> str:
    """F.embedding(ids, table, ...)."""
    table, ids = call.operands
    defaults = {"padding_idx": -1, "scale_grad_by_freq": False, "sparse": False}
    values = zip(defaults.items(), call.op.args[2:], strict=False)
    options = [f"{key}={value!r}" for (key, default), value in values if value != default]
    return f"F.embedding({', '.join([ids, table, *options])})"


def attention(call: Call) -> str:
    """F.scaled_dot_product_attention(q, k, v, ...)."""
    return f"F.scaled_dot_product_attention({', '.join([*call.operands[:3], *_attention_keywords(call)])})"


def grouped_attention(call: Call) -> str:
    """The same, for the query heads of one rank."""
    keywords = [text for text in _attention_keywords(call) if not text.startswith("enable_gqa")]
    return f"grouped_attention_of_rank({', '.join([*call.operands[:3], call.tp, *keywords])})"


def causal_rows(call: Call) -> str:
    """The same, for the query rows of one rank."""
    keywords = [text for text in _attention_keywords(call) if not text.startswith("is_causal")]
    return f"causal_attention_of_rows({', '.join([*call.operands[:3], call.tp, *keywords])})"


def grouped_product(call: Call) -> str:
    """F.grouped_mm(rows, weight, offs=ends)."""
    rows, weight, *ends = call.operands
    return f"F.grouped_mm({', '.join([rows, weight, *(f'offs={text}' for text in ends)])})"


def own_experts(call: Call) -> str:
    """The same, of the experts of one rank."""
    return f"own_experts_mm({', '.join([*call.operands, call.tp])})"


def histogram(call: Call) -> str:
    """torch.histc(x, bins, min, max); torch has none for integers on CPU."""
    values, *rest = call.arguments()
    is_integer = not call.result.is_float
    text = f"torch.histc({', '.join([values + '.float()' if is_integer else values, *rest])})"
    return f"{text}.to({values}.dtype)" if is_integer else text


def _attention_keywords(call: Call) -> list[str]:
    names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    values = dict(zip(names, call.op.args[3:], strict=False)) | dict(call.op.kwargs)
    has_mask = isinstance(values.pop("attn_mask", None), Ref)
    defaults = {"dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    only_in_training = {"dropout_p": " if self.training else 0.0"}
    texts = [
        f"{key}={value!r}{only_in_training.get(key, '')}" for key, value in values.items() if value != defaults[key]
    ]
    return [f"attn_mask={call.operands[3]}", *texts] if has_mask else texts


def split_embedding(call: Call) -> str:
    """The look-up in a table of which each rank has some rows."""
    padding = [f"padding_idx={index}" for index in call.op.args[2:3] if index != -1]
    table, ids = call.operands
    return f"vocab_parallel_embedding({', '.join([ids, table, call.tp, *padding])})"


def norm(name: str) -> Printer:
    """F.layer_norm(x, shape, weight, bias, eps) without the flags of a backend."""

    def printer(call: Call) -> str:
        arguments = call.arguments()[:5]
        return f"F.{name}({', '.join(arguments)})"

    return printer


_REDUCTIONS = ("none", "mean", "sum")
_LOSS_DEFAULTS = {
    "reduction": "mean",
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "weight": None,
    "beta": 1.0,
    "delta": 1.0,
    "log_target": False,
}


def loss(name: str, *keywords: str) -> Printer:
    """Losses take their reduction as a number in ATen and as a word in `F`."""

    def printer(call: Call) -> str:
        return f"{name}({', '.join([*call.operands[:2], *_loss_keywords(call, keywords)])})"

    return printer


def _loss_keywords(call: Call, names: tuple[str, ...]) -> list[str]:
    values = dict(zip(names, call.op.args[2:], strict=False)) | dict(call.op.kwargs)
    if isinstance(values.get("reduction"), int):
        values["reduction"] = _REDUCTIONS[values["reduction"]]
    operands = iter(call.operands[2:])
    return [
        f"{key}={next(operands) if isinstance(value, Ref) else repr(value)}"
        for key, value in values.items()
        if value != _LOSS_DEFAULTS.get(key)
    ]


def split_cross_entropy(call: Call) -> str:
    """Cross-entropy of logits that are split over the classes; padding is no class."""
    keywords = _loss_keywords(call, ("weight", "reduction", "ignore_index", "label_smoothing"))
    if call.n_unpadded is not None:
        keywords.append(f"n_classes={call.n_unpadded}")
    return f"vocab_parallel_cross_entropy({', '.join([*call.operands, call.tp, *keywords])})"


def dropout(call: Call) -> str:
    """F.dropout(x, p, self.training)."""
    return f"F.dropout({call.operands[0]}, {call.op.args[1]!r}, self.training)"


def convolution(name: str, *options: str) -> Printer:
    """A convolution, whose groups are those of the local channels; `options` in the order of ATen."""
    defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}
    plain = keyworded(name, 3, **{option: defaults[option] for option in options})

    def printer(call: Call) -> str:
        position = 3 + options.index("groups")
        groups = argument(call.op, position, "groups", 1)
        if groups == 1:
            return plain(call)
        local = call.share(groups, dim=-1 - _n_space(call))
        arguments = (*call.op.args[:position], local, *call.op.args[position + 1 :])
        return plain(replace(call, op=replace(call.op, args=arguments)))

    return printer


def _n_space(call: Call) -> int:
    return int(call.op.target[call.op.target.index("d.") - 1])


def any_convolution(call: Call) -> str:
    """torch.convolution(x, weight, bias, ..., groups), with the groups of the local channels."""
    *rest, groups = call.arguments()
    local = call.op.args[8] if groups == "1" else call.share(call.op.args[8], dim=1)
    return f"torch.convolution({', '.join([*rest, str(local)])})"


def group_norm(call: Call) -> str:
    """F.group_norm(x, n_groups, weight, bias, eps), with the groups of the local channels."""
    x, _, *rest = call.arguments()[:5]
    return f"F.group_norm({', '.join([x, str(call.share(call.op.args[1], dim=1)), *rest])})"


def scattered(name: str) -> Printer:
    """`name(x, piece, dim, ...)`; through the real view of complex numbers, for which torch has no gradient of it."""
    plain = function(name)

    def printer(call: Call) -> str:
        if not call.result.is_complex:
            return plain(call)
        real = tuple(f"torch.view_as_real({text}.resolve_conj())" for text in call.operands)
        dim = int(argument(call.op, 2, "dim", 0)) % len(call.result.shape)
        as_real = replace(call.op, args=(*call.op.args[:2], dim, *call.op.args[3:]))
        return f"torch.view_as_complex({plain(replace(call, op=as_real, operands=real))})"

    return printer


def batch_norm(call: Call) -> str:
    """F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps).

    Running statistics are in float32, with which it takes no weight and bias in 16 bits.
    """
    x, weight, bias, mean, variance, training, *rest = call.arguments()[:8]
    if call.is_16_bit and mean != "None":
        weight, bias = (text if text == "None" else f"{text}.to({mean}.dtype)" for text in (weight, bias))
    training = "self.training" if training == "True" else training
    return f"F.batch_norm({', '.join([x, mean, variance, weight, bias, training, *rest])})"


def instance_norm(call: Call) -> str:
    """F.instance_norm(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)."""
    x, weight, bias, mean, variance, *rest = call.arguments()[:8]
    return f"F.instance_norm({', '.join([x, mean, variance, weight, bias, *rest])})"


def recurrent(name: str) -> Printer:
    """torch.lstm(x, states, weights, has_biases, n_layers, dropout, training, is_bidirectional, is_batch_first)."""

    def printer(call: Call) -> str:
        arguments = call.arguments()
        arguments[6] = "self.training" if arguments[6] == "True" else arguments[6]
        return f"torch.{name}({', '.join(arguments)})"

    return printer


def resize(mode: str, *, aligns: bool = False, antialias: bool = False) -> Printer:
    """F.interpolate(x, size or scale_factor, mode)."""

    def printer(call: Call) -> str:
        size, *rest = call.op.args[1:]
        texts = [call.operands[0]]
        texts.append(f"size={call.text(size)}" if size is not None else f"scale_factor={call.text(rest[-1])}")
        texts.append(f'mode="{mode}"')
        texts += [f"align_corners={rest[0]}"] if aligns else []
        texts += ["antialias=True"] if antialias else []
        return f"F.interpolate({', '.join(texts)})"

    return printer


_END = 2**62  # ATen's "to the end" is the largest integer


def slice_(call: Call) -> str:
    """x[:, 2:6]."""
    rank = len(call.result.shape)
    dim = argument(call.op, 1, "dim", 0) % rank
    start, stop = argument(call.op, 2, "start"), argument(call.op, 3, "end")
    step = argument(call.op, 4, "step", 1)
    first = "" if start in (None, 0) else call.text(start)
    last = "" if stop is None or (isinstance(stop, int) and stop > _END) else call.text(stop)
    text = f"{first}:{last}" + (f":{step}" if step != 1 else "")
    return f"{call.operands[0]}[{indexed(dim, rank, text)}]"


def narrow(call: Call) -> str:
    """x[:, start : start + length], or x[:, -length:]."""
    rank, start = len(call.result.shape), call.op.args[2]
    stop = start + call.op.args[3]
    is_to_the_end = start < 0 and stop == 0
    text = f"{start}:{'' if is_to_the_end else stop}"
    return f"{call.operands[0]}[{indexed(call.op.args[1] % rank, rank, text)}]"


def index(call: Call) -> str:
    """x[:, i]."""
    indices = iter(call.operands[1:])
    items = [":" if item is None else next(indices) for item in call.op.args[1]]
    return f"{call.operands[0]}[{', '.join(items)}]"


def index_put(call: Call) -> str:
    """x.index_put((i, j), values); torch has no public name for one that leaves out a dim."""
    x, *rest = call.arguments()
    if None in call.op.args[1]:
        return f"torch.ops.aten.index_put({', '.join([x, *rest])})"
    return f"{x}.index_put({', '.join(rest)})"


def repeat_interleave(call: Call) -> str:
    """x.repeat_interleave(n, dim); the length of the result follows."""
    dim = argument(call.op, 2, "dim")
    return f"{call.operands[0]}.repeat_interleave({call.op.args[1]}{f', dim={dim}' if dim is not None else ''})"


def pad(call: Call) -> str:
    """F.pad(x, amounts, mode, value)."""
    amounts, *rest = call.op.args[1:]
    is_constant = call.op.target == "aten.constant_pad_nd.default"
    mode, value = ("constant", *rest, 0)[:2] if is_constant else (*rest, *("constant", None)[len(rest) :])
    texts = [call.operands[0], call.text(amounts)]
    texts += [f'mode="{mode}"'] if mode != "constant" else []
    texts += [f"value={call.text(value)}"] if value not in (None, 0) else []
    return f"F.pad({', '.join(texts)})"


def reversed_difference(call: Call) -> str:
    """`other - x`."""
    other = call.text(call.op.args[1])
    scale = argument(call.op, 2, "alpha", 1)
    return f"{other} - {call.operands[0]}" if scale == 1 else f"{other} - {scale!r} * {call.operands[0]}"


def to_device(call: Call) -> str:
    """x.to(device, dtype)."""
    return f"{call.operands[0]}.to({', '.join(call.text(item) for item in call.op.args[1:3])})"


def tensordot(call: Call) -> str:
    """torch.tensordot(a, b, dims)."""
    return f"torch.tensordot({', '.join(call.operands)}, dims={call.text(call.op.args[2:4])})"


def einsum(call: Call) -> str:
    """torch.einsum(equation, *operands)."""
    return f'torch.einsum("{call.op.args[0]}", {", ".join(call.operands)})'
