"""The torch ops of the family: `quantize_rows` and `multiply_rows`, for compiled graphs on a GPU.

A compiler parts the largest magnitude of a row from the cast that needs it and reads the rows
twice; an op reads them once. Ops get tensors and numbers only, and run on the current stream. What
a call does not have is an empty tensor in their results.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from sage_plugin import device, settings
from sage_plugin.kernels.launch_config import Memo
from sage_plugin.kernels.linear.activation import MOST_REMEMBERED
from sage_plugin.kernels.linear.backends.torch_products import TorchProducts
from sage_plugin.kernels.linear.launch_space import find_launch
from sage_plugin.kernels.linear.quantizer import quantizer_of
from sage_plugin.kernels.linear.rows.prologue import NO_PROLOGUE, Prologue
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.linear.rows.row_format import RowFormat
from sage_plugin.kernels.linear.weight import QuantizedWeight
from sage_plugin.kernels.surroundings import on_device, without_autocast
from sage_plugin.schema import LinearKey

if TYPE_CHECKING:
    from sage_plugin.kernels.linear.backends.triton.products import TritonProducts

__all__ = ["library", "multiply_by_op", "quantize_by_op"]

library = torch.library.Library("sage_plugin", "FRAGMENT")

Made = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def quantize_by_op(
    x: torch.Tensor,
    form: RowFormat,
    smooth: torch.Tensor | None = None,
    prologue: Prologue = NO_PROLOGUE,
    *,
    keep: bool = False,
) -> tuple[QuantizedRows, torch.Tensor | None]:
    """Quantize rows by the op; traceable.

    Args:
        x: `(..., K)`.
        form: the format.
        smooth: `(K,)` that channels are divided by.
        prologue: what comes before.
        keep: whether the rows are wanted in `x`'s dtype too, before they are smoothed.

    Returns:
        `(M, K)` rows, and those in `x`'s dtype or `None`.
    """
    data, scale, offset, sums, kept = torch.ops.sage_plugin.quantize_rows_once(
        x, smooth, *prologue.tensors(), prologue.kind, prologue.eps, form.dtype, form.per_tensor,
        form.rotation, form.asymmetric, keep,
    )  # fmt: skip
    if not form.asymmetric:
        return QuantizedRows(data, scale), kept if keep else None
    return QuantizedRows(data, scale, offset, sums), kept if keep else None


def multiply_by_op(
    rows: QuantizedRows,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    config_dir: str | None = None,
) -> torch.Tensor:
    """Multiply quantized rows by the op, which takes our product on a GPU; traceable."""
    out: torch.Tensor = torch.ops.sage_plugin.multiply_rows(
        rows.data, rows.scale, rows.offset, rows.sums, weight.data, weight.scale, weight.offset,
        weight.sums, bias, weight.kernel, out_dtype, config_dir,
    )  # fmt: skip
    return out


def _quantize(
    x: torch.Tensor, smooth: torch.Tensor | None, gate: torch.Tensor | None,
    weight: torch.Tensor | None, bias: torch.Tensor | None, factor: torch.Tensor | None,
    shift: torch.Tensor | None, prologue: str, eps: float, dtype: torch.dtype, per_tensor: bool,
    rotation: int, asymmetric: bool, keep: bool,
) -> Made:  # fmt: skip
    form = RowFormat(dtype, per_tensor, rotation, asymmetric)
    before = NO_PROLOGUE
    if prologue != "none":
        before = Prologue(prologue, gate, weight, bias, eps, factor, shift)
    kept = torch.empty(x.shape, dtype=x.dtype, device=x.device) if keep else None
    with on_device(x.device), without_autocast(x.device):
        rows = quantizer_of(x.device)(x, form, smooth, before, kept)
    kept = _nothing(x) if kept is None else kept
    if rows.offset is None or rows.sums is None:
        return rows.data, rows.scale, _nothing(x), _nothing(x), kept
    # The outputs of an op share no memory.
    return rows.data, rows.scale.clone(), rows.offset.clone(), rows.sums.clone(), kept


class _Traced(NamedTuple):
    """What the op made of a tensor while a compiler traced; forgotten when that is."""

    x: weakref.ref[torch.Tensor]
    version: int
    others: tuple[object, ...]
    made: Made


_traced = threading.local()


def _quantize_once(x: torch.Tensor, *others: object) -> Made:
    """Quantize by the op `quantize_rows`, once for equal calls in a graph.

    A compiler takes equal calls of an op of ours for different ones. It traces this op, which is
    made of others, with tensors that stand for those of the graph: the same one for each reader.
    """
    op = torch.ops.sage_plugin.quantize_rows
    if type(x).__name__ != "FunctionalTensor":
        fresh: Made = op(x, *others)
        return fresh
    before: list[_Traced] = _traced.__dict__.setdefault("made", [])
    for one in before:
        if one.x() is x and one.version == x._version and _same(one.others, others):
            return one.made
    made: Made = op(x, *others)
    del before[: 1 - MOST_REMEMBERED]
    before.append(_Traced(weakref.ref(x, lambda _: before.clear()), x._version, others, made))
    return made


def _same(some: tuple[object, ...], others: tuple[object, ...]) -> bool:
    """Whether arguments are the same tensors, and equal otherwise."""
    return all(
        a is b or not (isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or a != b)
        for a, b in zip(some, others, strict=True)
    )


def _nothing(x: torch.Tensor) -> torch.Tensor:
    """Stand for a result that a call does not have."""
    return x.new_empty(0, dtype=torch.float32)


def _fake_quantize(
    x: torch.Tensor, smooth: torch.Tensor | None, gate: torch.Tensor | None,
    weight: torch.Tensor | None, bias: torch.Tensor | None, factor: torch.Tensor | None,
    shift: torch.Tensor | None, prologue: str, eps: float, dtype: torch.dtype, per_tensor: bool,
    rotation: int, asymmetric: bool, keep: bool,
) -> Made:  # fmt: skip
    channels = x.shape[-1]
    rows = x.numel() // channels
    scale = x.new_empty(() if per_tensor else (rows, 1), dtype=torch.float32)
    offset, sums = (torch.empty_like(scale) if asymmetric else _nothing(x) for _ in range(2))
    kept = x.new_empty(x.shape) if keep else _nothing(x)
    return x.new_empty((rows, channels), dtype=dtype), scale, offset, sums, kept


def _multiply(
    x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, sums: torch.Tensor | None,
    w: torch.Tensor, w_scale: torch.Tensor, w_offset: torch.Tensor | None,
    w_sums: torch.Tensor | None, bias: torch.Tensor | None, kernel: str, out_dtype: torch.dtype,
    config_dir: str | None = None,
) -> torch.Tensor:  # fmt: skip
    rows = QuantizedRows(x, scale, offset, sums)
    weight = QuantizedWeight(w, w_scale, kernel, None, 0, w_offset, w_sums)
    with on_device(x.device), without_autocast(x.device):
        dtype = str(out_dtype).removeprefix("torch.")
        key = LinearKey(kernel, "triton", x.shape[1], w.shape[0], dtype, x.shape[0])
        return _products_of(x.device, key, config_dir).multiply(rows, weight, bias, out_dtype)


_products: Memo[TorchProducts | TritonProducts] = Memo(1024)


def _products_of(
    where: torch.device, key: LinearKey, config_dir: str | None
) -> TorchProducts | TritonProducts:
    """What multiplies the calls of a key on a device."""
    at = (where, key, config_dir, settings.of_calls())
    found = _products.get(at)
    if found is None:
        found = _new_products(where, key, config_dir)
        _products.keep(at, found)
    return found


def _new_products(
    where: torch.device, key: LinearKey, config_dir: str | None
) -> TorchProducts | TritonProducts:
    if where.type == "cpu" or not device.triton_version():
        return TorchProducts()
    from sage_plugin.kernels.linear.backends.triton.products import TritonProducts

    facts = device.facts_of(where.type, where.index)
    return TritonProducts(find_launch(key, facts, config_dir=config_dir).config)


def _fake_multiply(
    x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, sums: torch.Tensor | None,
    w: torch.Tensor, w_scale: torch.Tensor, w_offset: torch.Tensor | None,
    w_sums: torch.Tensor | None, bias: torch.Tensor | None, kernel: str, out_dtype: torch.dtype,
    config_dir: str | None = None,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype)


_QUANTIZE = (
    "Tensor x, Tensor? smooth, Tensor? gate, Tensor? weight, Tensor? bias, Tensor? factor, "
    "Tensor? shift, str prologue, float eps, ScalarType dtype, bool per_tensor, int rotation, "
    "bool asymmetric, bool keep"
)
_MULTIPLY = (
    "Tensor x, Tensor scale, Tensor? offset, Tensor? sums, Tensor w, Tensor w_scale, "
    "Tensor? w_offset, Tensor? w_sums, Tensor? bias, str kernel, ScalarType out_dtype, "
    "str? config_dir=None"
)
for _name, _arguments, _returns, _real, _fake in (
    ("quantize_rows", _QUANTIZE, f"({', '.join(['Tensor'] * 5)})", _quantize, _fake_quantize),
    ("multiply_rows", _MULTIPLY, "Tensor", _multiply, _fake_multiply),
):
    library.define(f"{_name}({_arguments}) -> {_returns}")
    for _key in ("CPU", "CUDA"):
        library.impl(_name, _real, _key)
    torch.library.register_fake(f"sage_plugin::{_name}", _fake, lib=library)
library.define(f"quantize_rows_once({_QUANTIZE}) -> ({', '.join(['Tensor'] * 5)})")
library.impl("quantize_rows_once", _quantize_once, "CompositeImplicitAutograd")
