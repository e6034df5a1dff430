"""What values would like to be called: as in the user's source, else after the module that made them, else the op."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoplan.codegen.lines import Wish
from autoplan.graph import LOSS_PATH, Op, OpGraph, Ref

# Operators that are the whole of a module, so that its name tells what they made.
_MODULE_OPS = frozenset(
    {
        "linear", "padded_linear", "addmm", "embedding", "layer_norm", "rms_norm", "group_norm", "batch_norm",
        "conv1d", "conv2d", "conv3d",
    }
)  # fmt: skip
# The result is its operand in another form, and keeps its name.
_SAME = frozenset(
    {"to", "_to_copy", "alias", "clone", "contiguous", "detach", "dropout", "expand", "view", "reshape", "unsqueeze"}
)
_WORDS = {
    "scaled_dot_product_attention": "attended",
    "cross_entropy_loss": "loss",
    "mse_loss": "loss",
    "getitem": "piece",
    "__and__": "mask",
    "__or__": "mask",
}


@dataclass(frozen=True, slots=True)
class ValueNames:
    """Wishes for names.

    Attributes:
        makers: the op that makes each value.
        inputs: the last key on the path to each input.
        blocks: the path of the block around each op; "" between blocks.
    """

    makers: Mapping[str, Op]
    inputs: Mapping[str, str]
    blocks: Mapping[str, str]

    @classmethod
    def of(cls, graph: OpGraph) -> ValueNames:
        """The wishes of one graph."""
        inputs = {item.name: str(item.path[-1]) for item in graph.inputs}
        blocks = {op.name: segment.module_path for segment in graph.segments for op in graph.ops_of(segment)}
        return cls({op.name: op for op in graph.ops}, inputs, blocks)

    def wish(self, op: Op) -> Wish:
        """How the result of an op would like to be called."""
        module = self._module_name(op)
        if op.label:
            inner = op.module_path.removeprefix(self.blocks[op.name]).rpartition(".")[2]
            return Wish((op.label, inner) if inner.isidentifier() and op.module_path != LOSS_PATH else (op.label,))
        name = module or _operator_word(op)
        return Wish((name,), may_rebind=False)

    def argument(self, values: Iterable[str]) -> str:
        """What a parameter is called that takes these values in different calls: the commonest of their names."""
        return Counter(map(self._plain_name, values)).most_common(1)[0][0]

    def is_module_result(self, op: Op) -> bool:
        """Whether an op is all that its module does."""
        return self._module_name(op) != ""

    def module_of(self, name: str) -> str:
        """The path, inside its block, of the module whose result a value is; "" when it is no module's."""
        op = self.makers.get(name)
        if op is None or not self._module_name(op):
            return ""
        return op.module_path.removeprefix(f"{self.blocks[name]}.")

    def _module_name(self, op: Op) -> str:
        last = op.module_path.rpartition(".")[2]
        is_module = operator_name(op) in _MODULE_OPS and op.module_path != LOSS_PATH
        return last if is_module and last.isidentifier() else ""

    def _plain_name(self, name: str) -> str:
        """The name of a value outside of the function that made it."""
        op = self.makers.get(name)
        while op and not op.label and operator_name(op) in _SAME and isinstance(op.args[0], Ref):
            name = op.args[0].name
            op = self.makers.get(name)
        if op is None:
            found = self.inputs.get(name, name)
            return found if found.isidentifier() else _as_identifier(name)
        return self.wish(op).names[0]


def _as_identifier(name: str) -> str:
    """A weight that goes from one function to another is called after its path: `heads_0_weight`."""
    text = re.sub(r"\W", "_", name)
    return text if text.isidentifier() else f"value_{text}"


def operator_name(op: Op) -> str:
    """The operator without its namespace and overload: `linear`."""
    return op.target.split(".")[1] if "." in op.target else op.target


def _operator_word(op: Op) -> str:
    operator = operator_name(op)
    return _WORDS.get(operator, operator.strip("_"))
