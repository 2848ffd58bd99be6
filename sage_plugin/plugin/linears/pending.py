"""A norm whose output is not made yet, so that modulation and quantization join its pass.

Blocks write `norm(x) * (1 + scale) + shift`, some in fp32 with a cast behind it, and give that to
linears. In eager mode each of these operations reads and writes all tokens. A `PendingNorm` stands
for the output: a product, a sum and a cast are taken down, and whatever else is done with it gets
the tensor, made in one pass, which quantizes the rows for the linears too.

The tensor is made with the last operation that a block writes, so that what the block calls then,
such as compiled attention, gets a plain one: the sum, or where that is in fp32 the cast behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from sage_plugin.kernels.linear.rows.prologue import Prologue
from sage_plugin.kernels.linear.weight import QuantizedWeight
from sage_plugin.plugin.linears import compute

_PRODUCTS = (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__)
_SUMS = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)
_CASTS = (torch.Tensor.to, torch.Tensor.type_as)
_NAMES = frozenset(("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout"))


class PendingNorm(torch.Tensor):
    """Stands for the output of a norm, of its shape, dtype and device.

    Attributes:
        x: the norm's input, or a copy of it.
        given: the norm's input.
        prologue: the norm, and what it is modulated by.
        reader: a weight whose format rows are quantized in, where they are not yet asked for.
        version: that of the input when the norm was called.
        made: the output, once somebody read it.
        watcher: told, when the output is made, whether the input is as it was; `None` for nobody.
    """

    x: torch.Tensor
    given: torch.Tensor
    prologue: Prologue
    reader: QuantizedWeight
    version: int
    made: torch.Tensor | None
    watcher: Callable[[bool], object] | None

    @staticmethod
    def of(
        x: torch.Tensor,
        norm: Prologue,
        reader: QuantizedWeight,
        watcher: Callable[[bool], object] | None = None,
    ) -> PendingNorm:
        """Stand for a norm of `x`; of a copy, where somebody watches whether that is needed."""
        return PendingNorm._of(x if watcher is None else x.clone(), x, norm, reader, x.dtype,
                               x._version, watcher)  # fmt: skip

    @staticmethod
    def _of(
        x: torch.Tensor,
        given: torch.Tensor,
        norm: Prologue,
        reader: QuantizedWeight,
        dtype: torch.dtype,
        version: int,
        watcher: Callable[[bool], object] | None,
    ) -> PendingNorm:
        pending: PendingNorm = torch.Tensor._make_wrapper_subclass(
            PendingNorm, x.shape, dtype=dtype, device=x.device
        )
        pending.x, pending.given, pending.prologue, pending.reader = x, given, norm, reader
        pending.version, pending.made, pending.watcher = version, None, watcher
        return pending

    def tensor(self, reader: QuantizedWeight | None = None) -> torch.Tensor:
        """The output, made at the first time.

        Args:
            reader: the weight of the linear that reads it; its format is that of the rows.

        Raises:
            RuntimeError: the input was written since.
        """
        if self.made is None:
            unchanged = self.given._version == self.version
            if self.watcher is not None:
                self.watcher(unchanged)
            elif not unchanged:
                raise RuntimeError(
                    "the input of a norm was written before its output was read; patch without "
                    "linears=, and report this model"
                )
            weight = self.reader if reader is None else reader
            self.made = compute.quantize_norm(self.x, self.prologue, weight, self.dtype)
        return self.made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Take down modulation and casts; for all else, give the tensor."""
        if getattr(getattr(func, "__self__", None), "__name__", None) in _NAMES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        if not kwargs and len(args) == 2:
            later = _taken_down(func, *args)
            if later is not None:
                return later
        return func(*_read(args), **_read(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Give the tensor to what comes by another way than torch's functions."""
        return func(*_read(args), **_read(kwargs or {}))


def _read(values: Any) -> Any:  # noqa: ANN401
    return tree_map_only(PendingNorm, PendingNorm.tensor, values)


def _taken_down(func: Callable[..., Any], first: Any, second: Any) -> torch.Tensor | None:  # noqa: ANN401
    """What a product, a sum or a cast makes of a norm; `None` where it has to be computed."""
    pending, other = (first, second) if isinstance(first, PendingNorm) else (second, first)
    if not isinstance(pending, PendingNorm) or pending.made is not None:
        return None
    norm = pending.prologue
    if func in _CASTS:
        dtype = other.dtype if isinstance(other, torch.Tensor) else other
        fits = pending is first and dtype in (torch.float16, torch.bfloat16, torch.float32)
        return _like(pending, norm, dtype).tensor() if fits else None
    if type(other) is not torch.Tensor or not _modulates(other, pending) or norm.shift is not None:
        return None
    dtype = torch.promote_types(pending.dtype, other.dtype)
    if func in _PRODUCTS and norm.factor is None:
        return _like(pending, _modulated(norm, factor=other), dtype)
    if func in _SUMS:
        whole = _like(pending, _modulated(norm, factor=norm.factor, shift=other), dtype)
        return whole if dtype == torch.float32 else whole.tensor()
    return None


def _modulates(other: torch.Tensor, pending: PendingNorm) -> bool:
    """Whether a tensor is small beside the norm and broadcasts to it."""
    shape, to = other.shape, pending.shape
    return (
        other.is_floating_point()
        and other.device == pending.device
        and not compute.wants_gradient(other)
        and 0 < len(shape) <= len(to)
        and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))
    )


def _modulated(
    norm: Prologue, factor: torch.Tensor | None, shift: torch.Tensor | None = None
) -> Prologue:
    return Prologue(norm.kind, None, norm.weight, norm.bias, norm.eps, factor, shift)


def _like(pending: PendingNorm, norm: Prologue, dtype: torch.dtype) -> PendingNorm:
    return PendingNorm._of(
        pending.x, pending.given, norm, pending.reader, dtype, pending.version, pending.watcher
    )
