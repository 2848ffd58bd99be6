"""The surroundings of a call: its backend, device, output, and torch's dispatcher.

Our ops exist for what stands between a caller and a kernel: compilers and tracers, modes, function
transforms, subclasses, lazy bits. Without any of them an op would call its implementation and do
nothing else, at a cost as large as the whole look-up. Torch keeps account of them in dispatch keys:
a tensor with a key that a new one has not, or a thread with one more than at its start, goes
through the op, as every call does if a release of torch has no such account.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import Decision, Implementation
from sage_plugin.schema import DeviceFacts

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


def built(decision: Decision, facts: DeviceFacts) -> Implementation[Any]:
    """The implementation of what was decided, with the FP8 type of the device."""
    fp8 = getattr(torch, facts.fp8_dtype or "float8_e4m3fn")
    return implementation(decision.kernel, decision.variant, fp8)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one for a while; nothing where it is so already."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Keep autocast out of an implementation; nothing where it is off."""
    if not torch.is_autocast_enabled(device.type):
        return _NOTHING
    return torch.autocast(device.type, enabled=False)


def as_promised(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The host's output in the memory order that the fakes tell a compiler of."""
    promised = empty_as(q, out.dtype, out.shape[-1])
    return out if out.stride() == promised.stride() else promised.copy_(out)


def empty_as(q: torch.Tensor, dtype: torch.dtype, dv: int) -> torch.Tensor:
    """An output in Q's memory order where it has Q's shape, packed or not; the fakes use it too."""
    if dv == q.shape[-1]:
        return torch.empty_like(q, dtype=dtype)
    return q.new_empty((*q.shape[:-1], dv), dtype=dtype)


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
