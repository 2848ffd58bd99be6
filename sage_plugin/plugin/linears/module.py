"""The class that a linear has while it is patched: the same module, with an 8-bit weight beside.

Whatever reads `weight` beside a forward gets the original on the linear's device, and the 8-bit
weight is made anew before it is used again, since a write through `.data` leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from sage_plugin.plugin.linears.layer import SLOT, LinearLayer
from sage_plugin.plugin.twin import ORIGINAL

WEIGHT = "weight"


class QuantizedLinear(nn.Linear):
    """A linear that multiplies 8-bit values; copies and pickles of it are plain linears."""

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        """The original weight, which waits elsewhere until somebody reads it.

        Raises:
            PatchError: the originals were freed.
        """
        if not torch.compiler.is_compiling() and (layer := _layer(self)) is not None:
            layer.bring_home(self)
        for place in (self._parameters, vars(self)):
            if WEIGHT in place:
                weight: nn.Parameter = place[WEIGHT]  # type: ignore[assignment]
                return weight
        raise AttributeError(f"{type(self).__name__!r} object has no attribute 'weight'")

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401
        """Take note of another weight."""
        if name == WEIGHT:
            if (layer := _layer(self)) is not None:
                layer.forget(self)
            if WEIGHT not in self._parameters and not isinstance(value, nn.Parameter):
                vars(self)[WEIGHT] = value  # as pruning leaves it; a property would take no value
                return
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply on the kernel that the layer has, or as ever."""
        layer: LinearLayer | None = getattr(self, SLOT, None)
        if layer is None:  # a hook that came while it was patched still calls this
            return linear(x, self.weight, self.bias)
        if torch.compiler.is_compiling():
            return layer.trace(self, x)
        return layer.run(self, x)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:  # noqa: ANN401
        layer = _layer(self)
        if layer is None:
            return super()._apply(fn, recurse)
        with layer.moving(self, fn):
            return super()._apply(fn, recurse)

    def _save_to_state_dict(self, *args: Any) -> None:  # noqa: ANN401
        if (layer := _layer(self)) is not None:
            layer.prepare_reading(self)
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:  # noqa: ANN401
        if (layer := _layer(self)) is not None:
            layer.bring_home(self)
        super()._load_from_state_dict(*args)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:  # noqa: ANN401
        """A copy or a pickle is a plain linear with the original weight, where that was."""
        state = {key: value for key, value in vars(self).items() if key != SLOT}
        if (layer := _layer(self)) is not None:
            state["_parameters"] = layer.original_parameters(self)
        return object.__new__, (nn.Linear,), state


setattr(QuantizedLinear, ORIGINAL, nn.Linear)


def _layer(module: nn.Module) -> LinearLayer | None:
    layer: LinearLayer | None = vars(module).get(SLOT)
    return layer
