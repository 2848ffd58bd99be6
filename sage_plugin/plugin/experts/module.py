"""The class that a module of experts has while it is patched, made of its own."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn

from sage_plugin.plugin.experts.layer import SLOT, ExpertsLayer, layer_in
from sage_plugin.plugin.hosts.tensor_parallel import transforms_of
from sage_plugin.plugin.twin import ORIGINAL, ClassMemo, plain_class


def swap(module: nn.Module, layer: ExpertsLayer) -> None:
    """Let a layer run the experts of a module."""
    transforms, patched = transforms_of(module), patched_class(type(module))
    assert patched is not None
    module.__class__ = patched
    vars(module)[SLOT] = layer
    layer.transforms = transforms
    if transforms is not None:
        transforms.install(module)


def put_back(module: nn.Module) -> None:
    """Undo `swap`."""
    layer: ExpertsLayer | None = vars(module).pop(SLOT, None)
    if layer is not None and layer.transforms is not None:
        layer.transforms.put_back(module)
    module.__class__ = plain_class(type(module))


@ClassMemo
def patched_class(cls: type) -> type:
    """Return the class of patched experts that is made of another one."""
    return types.new_class(cls.__name__, (cls,), exec_body=lambda names: names.update(_names(cls)))


def _names(cls: Any) -> dict[str, Any]:  # noqa: ANN401
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        stock = functools.partial(cls.forward, self)
        layer = layer_in(self)
        if layer is None:  # a hook that came while it was patched still calls this
            out: torch.Tensor = stock(*args, **kwargs)
            return out
        return layer.run(self, stock, *args, **kwargs)

    def save(self: nn.Module, *args: Any) -> None:  # noqa: ANN401
        if (layer := layer_in(self)) is not None:
            layer.check_original()
        cls._save_to_state_dict(self, *args)

    def apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:  # noqa: ANN401
        moved: nn.Module = cls._apply(self, fn, recurse)
        layer = layer_in(self)
        if layer is not None and layer.freed and layer.quantized is not None:
            place = fn(torch.empty(0, device=layer.quantized.up.data.device)).device
            layer.quantized = layer.quantized.to(place)
        return moved

    def reduce(self: nn.Module, protocol: object) -> tuple[Any, ...]:
        if (layer := layer_in(self)) is not None:
            layer.check_original()
        state = {key: value for key, value in vars(self).items() if key != SLOT}
        return object.__new__, (plain_class(type(self)),), state

    return {
        "forward": forward, "_save_to_state_dict": save, "_apply": apply, "__reduce_ex__": reduce,
        "__module__": cls.__module__, "__qualname__": cls.__qualname__, ORIGINAL: cls,
    }  # fmt: skip
