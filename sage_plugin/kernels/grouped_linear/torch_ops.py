"""The torch ops of the family: `grouped_linear`, and `grouped_product` of 8-bit rows and weights.

Both are opaque to a compiler: how rows are spread over groups is data. Neither has a gradient.
"""

from __future__ import annotations

import torch

from sage_plugin.kernels.grouped_linear.call import GroupedLinearCall
from sage_plugin.kernels.grouped_linear.executor import run
from sage_plugin.kernels.grouped_linear.weight import GroupedWeight
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.linear.torch_ops import library
from sage_plugin.kernels.linear.weight import QuantizedWeight
from sage_plugin.kernels.resolver import BackendRequest

__all__ = ["grouped_linear_by_op", "traced_product"]


def grouped_linear_by_op(call: GroupedLinearCall, request: BackendRequest) -> torch.Tensor:
    """Run a call with original weights by the op, which quantizes them once; traceable."""
    x, weights, group_sizes, bias, out_dtype = call
    out: torch.Tensor = torch.ops.sage_plugin.grouped_linear(
        x, weights, group_sizes, bias, request.kernel, request.backend, out_dtype
    )
    return out


def traced_product(
    rows: QuantizedRows,
    weights: GroupedWeight,
    group_sizes: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    config_dir: str | None = None,
) -> torch.Tensor:
    """Multiply quantized rows by the op; traceable."""
    out: torch.Tensor = torch.ops.sage_plugin.grouped_product(
        rows.data, rows.scale, weights.data, weights.scale, group_sizes, bias, weights.kernel,
        out_dtype, config_dir,
    )  # fmt: skip
    return out


def _linear(
    x: torch.Tensor, weights: torch.Tensor, group_sizes: torch.Tensor, bias: torch.Tensor | None,
    kernel: str, backend: str, out_dtype: torch.dtype | None,
) -> torch.Tensor:  # fmt: skip
    return run(
        GroupedLinearCall(x, weights, group_sizes, bias, out_dtype), BackendRequest(kernel, backend)
    )


def _product(
    x: torch.Tensor, scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor,
    group_sizes: torch.Tensor, bias: torch.Tensor | None, kernel: str, out_dtype: torch.dtype,
    config_dir: str | None,
) -> torch.Tensor:  # fmt: skip
    flat = QuantizedWeight(w.flatten(0, 1), w_scale.flatten(), kernel)
    weights = GroupedWeight(flat, w.shape[0])
    rows = QuantizedRows(x, scale)
    call = GroupedLinearCall(rows, weights, group_sizes, bias, out_dtype)
    return run(call, BackendRequest(config_dir=config_dir))


def _fake_linear(
    x: torch.Tensor, weights: torch.Tensor, group_sizes: torch.Tensor, bias: torch.Tensor | None,
    kernel: str, backend: str, out_dtype: torch.dtype | None,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], weights.shape[1]), dtype=out_dtype or x.dtype)


def _fake_product(
    x: torch.Tensor, scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor,
    group_sizes: torch.Tensor, bias: torch.Tensor | None, kernel: str, out_dtype: torch.dtype,
    config_dir: str | None,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], w.shape[1]), dtype=out_dtype)


for _name, _arguments, _real, _fake in (
    (
        "grouped_linear",
        "Tensor x, Tensor weights, Tensor group_sizes, Tensor? bias, str kernel, str backend, "
        "ScalarType? out_dtype",
        _linear,
        _fake_linear,
    ),
    (
        "grouped_product",
        "Tensor x, Tensor scale, Tensor w, Tensor w_scale, Tensor group_sizes, Tensor? bias, "
        "str kernel, ScalarType out_dtype, str? config_dir",
        _product,
        _fake_product,
    ),
):
    library.define(f"{_name}({_arguments}) -> Tensor")
    for _key in ("CPU", "CUDA"):
        library.impl(_name, _real, _key)
    torch.library.register_fake(f"sage_plugin::{_name}", _fake, lib=library)
