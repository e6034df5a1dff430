"""Parameters without dims, such as a temperature: held as vectors of one element, which can be divided.

`fully_shard` divides the first dim of a parameter, so it refuses one that has none. The module keeps the vector under
the user's own name, and whoever reads the attribute gets its only element, as in the user's model:

    module._parameters["temperature"]   [1], what is sharded, trained and saved
    module.temperature                  [], a view of it

so gathering, casting, reducing, clipping and the optimizer need to know nothing of it. It is so under every plan,
since a checkpoint of the optimizer's state is read under any other. Between steps a divided one is the divided vector,
as any divided parameter is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def hold_as_vectors(root: nn.Module) -> None:
    """Replace each parameter without dims below `root` by a vector of one element; tied ones stay tied."""
    held: dict[nn.Parameter, nn.Parameter] = {}
    classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}
    for module in root.modules():
        found = {name: old for name, old in module._parameters.items() if old is not None and old.dim() == 0}
        if not found:
            continue
        for name, old in found.items():
            if old not in held:
                held[old] = nn.Parameter(old.detach().view(1), requires_grad=old.requires_grad)
            module._parameters[name] = held[old]
        kind = type(module), tuple(found)
        if kind not in classes:
            classes[kind] = _with_elements(*kind)
        module.__class__ = classes[kind]


def _with_elements(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The same class, whose attributes `names` are the only elements of the parameters of these names."""
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **{name: _element(name) for name in names}})


def _element(name: str) -> Any:
    def element(module: nn.Module) -> torch.Tensor:
        parameter = module._parameters[name]
        assert parameter is not None
        return parameter if isinstance(parameter, DTensor) else parameter.view(())

    return property(element)
