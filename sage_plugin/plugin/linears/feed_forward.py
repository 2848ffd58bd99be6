"""Feed-forward modules of diffusers whose GELU is made and quantized in one pass.

`FeedForward` calls the modules of its `net` one after the other: `GELU` with the linear inside, a
dropout, the linear out. With the latter on 8 bits what GELU makes is read by nobody else, so that
it need not be written in 16 bits. Whatever is not just that runs as it is written.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn

from sage_plugin.kernels.linear.rows.prologue import Prologue
from sage_plugin.plugin.linears.module import QuantizedLinear
from sage_plugin.plugin.twin import COPYING_MODULES, ORIGINAL, ClassMemo, plain_class

PROLOGUES = {"none": Prologue("gelu"), "tanh": Prologue("gelu_tanh")}
"""By GELU's own argument `approximate`."""


class FusedFeedForwards:
    """The feed-forward modules of a component whose class is swapped."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []

    def cover(self, model: nn.Module | None) -> None:
        """Swap the classes of those that end in a patched linear, and put back the others."""
        self.release()
        for module in () if model is None else model.modules():
            if _is_feed_forward(module) and isinstance(module.net[2], QuantizedLinear):  # type: ignore[index]
                module.__class__ = _fused_class(type(module))  # type: ignore[assignment]
                self._modules.append(weakref.ref(module))

    def release(self) -> None:
        """Put every class back."""
        for reference in self._modules:
            module = reference()
            if module is not None:
                module.__class__ = plain_class(type(module))
        self._modules.clear()


def _is_feed_forward(module: nn.Module) -> bool:
    """Whether a module is diffusers' own `FeedForward`, with a GELU of its own."""
    kind, net = type(module), module._modules.get("net")
    return (
        kind.__qualname__ == "FeedForward"
        and kind.__module__.startswith("diffusers.")
        and isinstance(net, nn.ModuleList)
        and len(net) >= 3
        and type(net[0]).__qualname__ == "GELU"
        and type(net[0]).__module__.startswith("diffusers.")
        and getattr(net[0], "approximate", None) in PROLOGUES
        and type(net[1]) is nn.Dropout
    )


def _make_fused(original: type[nn.Module]) -> type[nn.Module]:
    """A subclass whose forward makes and quantizes GELU in one pass, where that is the same."""

    @functools.wraps(original.forward)
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        net = self.net
        if args or kwargs or not _may_fuse(net):
            return original.forward(self, hidden_states, *args, **kwargs)
        gelu, down = net[0], net[2]
        made = gelu.proj(hidden_states)
        prologue = PROLOGUES[gelu.approximate]
        out = down._sage_linear.run_fused(down, made, prologue)
        if out is None:
            out = down(gelu.gelu(made))
        for module in net[3:]:
            out = module(out)
        return out

    names = {
        "forward": forward,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        ORIGINAL: original,
        **COPYING_MODULES,
    }
    return type(original.__name__, (original,), names)


_fused_class = ClassMemo(_make_fused)


def _may_fuse(net: nn.ModuleList) -> bool:
    """Whether nobody would miss the calls of GELU, dropout and the linear out."""
    gelu, dropout, down = net[0], net[1], net[2]
    if type(down) is not QuantizedLinear or dropout.training:
        return False
    return all(
        "forward" not in vars(one) and not one._forward_hooks and not one._forward_pre_hooks
        for one in (gelu, dropout, down)
    )
