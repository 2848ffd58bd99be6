"""Whether a call may skip torch's dispatcher, which costs as much as all that is looked up for it.

Our ops exist for what stands between a caller and a kernel: compilers and tracers, modes, function
transforms, subclasses, lazy bits. Where there is none of them an op would call its implementation
and do nothing else. Torch keeps account of them in dispatch keys, so those are asked: a tensor with
a key that a new one has not, or a thread with one more than at its start, goes through the op, as
every call does where a release of torch has no such account.
"""

from __future__ import annotations

import torch

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


def runs_directly(*tensors: torch.Tensor | None) -> bool:
    """Whether a call with these tensors means the same without an op.

    A profiler gets the op too, whose name its users look for.

    Example:
        >>> runs_directly(torch.ones(2), None)
        True
        >>> runs_directly(torch.ones(2, device="meta"))
        False
    """
    if (
        not _HAS_ACCOUNT
        or torch.compiler.is_compiling()
        or _is_torch_function_mode_enabled()
        or _autograd._profiler_enabled()
        or _dispatch_tls_local_include_set().raw_repr() not in _OF_THREADS
    ):
        return False
    for x in tensors:
        if x is not None and (
            type(x) not in _PLAIN or _dispatch_keys(x).raw_repr() not in _OF_TENSORS
        ):
            return False
    return True
