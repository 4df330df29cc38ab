"""What a user calls a module or a parameter: its path below the outermost module, or the script's own variable."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpx.engine.leaves import Leaves

__all__ = ["Names"]

LONGEST = 60


class Names:
    """Looks names up when something is reported; never on the way of a step."""

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves

    def of_module(self, module: nn.Module) -> str:
        """Return a module's path, or for an outermost one the variable or the text that stands for it."""
        for root in self._leaves.roots():
            for path, part in root.named_modules():
                if part is module:
                    return path or _root_name(root)
        return _root_name(module)

    def of_parameter(self, leaf: Tensor) -> tuple[str | None, str]:
        """Return the module and the name of a parameter; no module for a tensor that none owns."""
        for root in self._leaves.roots():
            for path, part in root.named_modules():
                for name, parameter in part._parameters.items():
                    if parameter is leaf:
                        owner = path or _root_name(root)
                        return owner, f"{owner}.{name}"
        return None, _variable(leaf) or f"tensor of shape {list(leaf.shape)}"

    def of_nearest_to_loss(self, leaves: Sequence[Tensor]) -> tuple[str | None, str]:
        """Name the one that the pass reached first: the last in the order in which models were called and built."""
        order: dict[int, int] = {}
        for root in self._leaves.roots():
            for module in root.modules():
                for parameter in module._parameters.values():
                    order[id(parameter)] = len(order)
        return self.of_parameter(max(leaves, key=lambda leaf: order.get(id(leaf), -1)))


def _root_name(root: nn.Module) -> str:
    try:
        text = f"{type(root).__name__}({root.extra_repr()})"
    except Exception:  # noqa: BLE001 - the script's own method, which may want an input that it has not seen
        text = type(root).__name__
    return _variable(root) or (text if len(text) <= LONGEST else type(root).__name__)


def _variable(value: object) -> str | None:
    """Return the name by which the script's main module knows a value."""
    main = list(vars(sys.modules["__main__"]).items())
    return next((name for name, held in main if held is value and not name.startswith("_")), None)
