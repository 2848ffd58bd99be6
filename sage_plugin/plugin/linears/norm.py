"""LayerNorms in front of patched linears: their output waits for modulation and quantization."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from sage_plugin.kernels.linear.rows.prologue import Prologue
from sage_plugin.plugin.context import layer_path
from sage_plugin.plugin.hosts.tensor_parallel import shard_of
from sage_plugin.plugin.linears import compute
from sage_plugin.plugin.linears.layer import LinearLayer
from sage_plugin.plugin.linears.pending import PendingNorm
from sage_plugin.plugin.twin import COPYING_MODULES, ORIGINAL, ClassMemo, plain_class

READER = "_sage_reader"
"""Where a norm has a linear whose inputs are as wide as its outputs."""
WAITS = "_sage_waits"
"""Whether a norm's output can wait without a copy of its input, which no forward has written before
the output was made."""
FP32 = "FP32LayerNorm"
"""Diffusers' LayerNorm that computes in fp32 and gives back the dtype of its input."""


class PendingNorms:
    """The norms of a component whose class is swapped."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []

    def cover(
        self, model: nn.Module | None, layers: Iterable[LinearLayer], attention: Iterable[str]
    ) -> None:
        """Swap the classes of norms as wide as the inputs of linears; put back the others.

        Args:
            model: the component's module, `None` when it is gone.
            layers: its patched linears.
            attention: paths of its attention modules, whose own norms are none of these.
        """
        self.release()
        inside = tuple(f"{path}." for path in attention)
        readers: dict[int, LinearLayer] = {}
        for layer in layers:
            module = layer.module
            weight = None if module is None else module._parameters["weight"]
            if weight is not None:
                readers.setdefault(shard_of(weight).shape[1], layer)
        for path, module in () if model is None else model.named_modules():
            if not _is_norm(module) or layer_path(path).startswith(inside):
                continue
            reader = readers.get(module.normalized_shape[0])
            if reader is not None:
                module.__class__ = _pending_class(type(module))
                vars(module)[READER] = weakref.ref(reader)
                self._modules.append(weakref.ref(module))

    def release(self) -> None:
        """Put every class back."""
        for reference in self._modules:
            module = reference()
            if module is not None:
                vars(module).pop(READER, None)
                vars(module).pop(WAITS, None)
                module.__class__ = plain_class(type(module))
        self._modules.clear()


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is torch's LayerNorm over channels, or diffusers' in fp32."""
    kind = type(module)
    of_diffusers = kind.__qualname__ == FP32 and kind.__module__.startswith("diffusers.")
    return (kind is nn.LayerNorm or of_diffusers) and len(module.normalized_shape) == 1  # type: ignore[arg-type]


def _make_pending(original: type[nn.LayerNorm]) -> type[nn.LayerNorm]:
    """A subclass whose output is made when somebody reads it."""

    @functools.wraps(original.forward)
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        weight = None if torch.compiler.is_compiling() else _weight_for(self, x)
        if weight is None:
            return original.forward(self, x)
        norm = Prologue("layer_norm", None, self.weight, self.bias, self.eps)
        watcher = None if vars(self).get(WAITS) else functools.partial(_note, self)
        return PendingNorm.of(x, norm, weight, watcher)

    def reduce_ex(self: nn.Module, protocol: object) -> tuple[Any, ...]:
        make, kinds, state = COPYING_MODULES["__reduce_ex__"](self, protocol)
        return make, kinds, {k: v for k, v in state.items() if k not in (READER, WAITS)}

    names = {
        "forward": forward,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": reduce_ex,
        ORIGINAL: original,
    }
    return type(original.__name__, (original,), names)


_pending_class = ClassMemo(_make_pending)


def _note(norm: nn.LayerNorm, unchanged: bool) -> None:
    """Keep what the first forwards show: once written too early is enough."""
    vars(norm)[WAITS] = unchanged and vars(norm).get(WAITS) is not False


def _nobody() -> None:
    """The reader of a norm that is not patched any more, whose hooks still call our forward."""


def _weight_for(norm: nn.LayerNorm, x: torch.Tensor) -> Any:  # noqa: ANN401
    """The 8-bit weight of a linear that may read a call's output; `None` to make it at once."""
    layer: LinearLayer | None = vars(norm).get(READER, _nobody)()
    if layer is None or layer.quantized is None or not layer.ready or layer.state.disabled:
        return None
    if type(x) is not torch.Tensor or norm._forward_hooks:
        return None
    if x.device != layer.quantized.data.device or not compute.can_wait(x):
        return None
    if torch.is_autocast_enabled(x.device.type):
        return None
    if compute.wants_gradient(x, norm.weight, norm.bias):
        return None
    return layer.quantized
