"""Norms of Q and K whose `forward` puts the work off inside a patched processor.

A norm gets a class of ours, a subclass of its own whose copies and pickles are of the original; all
else about it stays. In a graph, outside of patched processors, and wherever a reason speaks against
it, it does what it always did.
"""

from __future__ import annotations

import functools
import re
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sage_plugin.kernels.attention.prologue.record import QkNorm
from sage_plugin.plugin.context import STACK, LayerContext
from sage_plugin.plugin.prologue.deferred import Tape, is_waiting
from sage_plugin.plugin.prologue.eligible import obstacle
from sage_plugin.plugin.prologue.pending import Pending
from sage_plugin.plugin.prologue.unfused import Unfused
from sage_plugin.plugin.twin import COPYING_MODULES, ORIGINAL, generated_class, plain_class

OF_Q_OR_K = re.compile(r"(?=.*norm)(.*_)?(q|k|query|key)(_.*)?")
"""Names of the norms of Q and K in an attention module: `norm_q`, `k_norm`, `norm_added_k`."""

DIFFUSERS = "diffusers.models.normalization"
KINDS = {
    ("torch.nn.modules.normalization", "LayerNorm"): "layer",
    ("torch.nn.modules.normalization", "RMSNorm"): "rms",
    (DIFFUSERS, "FP32LayerNorm"): "layer",
    (DIFFUSERS, "RMSNorm"): "rms",
}
"""Classes of norms that are known, by module and name."""

_patched: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""How many layers have a norm in common."""


def attach(layer: LayerContext) -> None:
    """Let the norms of a patched layer put their work off."""
    module = layer.attention
    if module is None or layer.norms:
        return
    known = [
        child
        for name, child in module.named_children()
        if OF_Q_OR_K.fullmatch(name) and (_name(plain_class(type(child))) in KINDS)
    ]
    for child in known:
        _patched[child] = _patched.get(child, 0) + 1
        if generated_class(child) is None:
            child.__class__ = deferring_class(type(child))  # type: ignore[arg-type]
    layer.norms = tuple(map(weakref.ref, known))


def detach(layer: LayerContext) -> None:
    """Undo `attach`, but for norms that another patched layer has too."""
    for norm in (ref() for ref in layer.norms):
        if norm is None:
            continue
        _patched[norm] -= 1
        if _patched[norm] == 0:
            del _patched[norm]
            norm.__class__ = plain_class(type(norm))
    layer.norms = ()


@functools.cache
def deferring_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a norm's class that puts its work off; made once per class."""
    forward: Callable[..., torch.Tensor] = original.forward
    namespace: dict[str, object] = {
        **COPYING_MODULES,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        ORIGINAL: original,
        "forward": _forward_of(original, forward),
    }
    made: type[nn.Module] = types.new_class(
        original.__name__, (original,), exec_body=lambda own: own.update(namespace)
    )
    return made


def _forward_of(
    original: type[nn.Module], computed: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    @functools.wraps(computed)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        if torch.compiler.is_compiling() or kwargs or len(args) != 1:
            return computed(self, *args, **kwargs)
        frame = STACK.frames[-1] if STACK.frames else None
        if frame is None or frame.layer is None or is_waiting(args[0]):
            return computed(self, *args)
        x = args[0]
        norm = _read(self, original, x)
        reason = obstacle(frame.layer, x, *(() if norm is None else norm.tensors()))
        if reason is None and (norm is None or _hooked(self)):
            reason = Unfused.NORM if norm is None else Unfused.HOOKED
        if reason is not None:
            frame.unfused = reason
            return computed(self, x)
        if frame.tape is None:
            frame.tape = Tape()
        return frame.tape.put_off(computed, (self, x), {}, Pending.whole(x, norm))

    return forward


def _name(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _hooked(module: nn.Module) -> bool:
    own = vars(module)
    return bool(
        own["_forward_hooks"] or own["_forward_pre_hooks"] or "_hf_hook" in own or "forward" in own
    )


def _read(module: Any, original: type, x: object) -> QkNorm | None:  # noqa: ANN401
    """A norm as the kernel takes it; `None` where it would not give what the module gives."""
    home, name = _name(original)
    shape = tuple(module.dim if (home, name) == (DIFFUSERS, "RMSNorm") else module.normalized_shape)
    weight, bias = module.weight, getattr(module, "bias", None)
    if not isinstance(x, torch.Tensor) or x.dim() not in (3, 4) or shape != (x.shape[-1],):
        return None
    dtypes = {t.dtype for t in (weight, bias) if t is not None}
    if name != "FP32LayerNorm" and not dtypes <= {x.dtype}:
        return None
    if not isinstance(module.eps, float):
        return None
    rounds = home == DIFFUSERS and name == "RMSNorm" and weight is not None
    return QkNorm(
        KINDS[home, name], weight, bias, module.eps, x.dim() == 3, rounds and x.dtype.itemsize == 2
    )
