"""What surrounds a call: its device, autocast, gradients, and torch's dispatcher.

Our ops exist for what stands between a caller and a kernel: compilers and tracers, modes, function
transforms, subclasses, lazy bits. Without any of them an op would call its implementation and do
nothing else, at a cost as large as the whole look-up. Torch keeps account of them in dispatch keys:
a tensor with a key that a new one has not, or a thread with one more than at its start, goes
through the op, as every call does if a release of torch has no such account.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch.autograd import forward_ad

try:
    from torch._C import (
        DispatchKey,
        DispatchKeySet,
        _autograd,
        _dispatch_keys,
        _dispatch_tls_local_include_set,
        _is_torch_function_mode_enabled,
    )
except ImportError:
    _HAS_ACCOUNT = False
else:
    _HAS_ACCOUNT = True

_NOTHING = contextlib.nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one for a while; nothing where it is so already."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


def autocasts(device: torch.device) -> bool:
    """Return whether autocast is on for operations of a device; it is nowhere on `meta`."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Keep autocast out of an implementation; nothing where it is off."""
    if not torch.is_autocast_enabled(device.type):
        return _NOTHING
    return torch.autocast(device.type, enabled=False)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _raw(*names: str) -> int:
    """A set of dispatch keys as a number."""
    keys = 0
    for name in names:
        keys |= DispatchKeySet(getattr(DispatchKey, name)).raw_repr()
    return keys


def _of_tensors() -> frozenset[int]:
    """Keys of a plain tensor, outside and inside of inference mode."""
    return frozenset(
        _raw(kind, f"Autocast{kind}", *more)
        for kind in ("CPU", "CUDA")
        for more in (("ADInplaceOrView", f"Autograd{kind}"), ())
    )


_OF_TENSORS = _of_tensors() if _HAS_ACCOUNT else frozenset()
_OF_THREADS = (
    frozenset((_raw("BackendSelect", "ADInplaceOrView"), _raw("BackendSelect")))
    if _HAS_ACCOUNT
    else frozenset()
)


def can_bypass_dispatcher(*tensors: torch.Tensor | None) -> bool:
    """Whether a call with these tensors means the same without an op.

    A profiler gets the op too, whose name its users look for.

    Example:
        >>> can_bypass_dispatcher(torch.ones(2), None)
        True
        >>> can_bypass_dispatcher(torch.ones(2, device="meta"))
        False
    """
    return are_plain(*tensors) and not _autograd._profiler_enabled()


def are_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether nothing but a profiler watches what is done with these tensors."""
    if (
        not _HAS_ACCOUNT
        or torch.compiler.is_compiling()
        or _is_torch_function_mode_enabled()
        or _dispatch_tls_local_include_set().raw_repr() not in _OF_THREADS
    ):
        return False
    for x in tensors:
        if x is not None and (
            type(x) not in _PLAIN or _dispatch_keys(x).raw_repr() not in _OF_TENSORS
        ):
            return False
    return True


def wants_gradient(*tensors: torch.Tensor | None) -> bool:
    """Return whether a gradient has to flow through a call with these tensors, back or forward."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return forward_ad._current_level >= 0 and any(map(_has_tangent, tensors))


def _has_tangent(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None
