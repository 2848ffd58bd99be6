"""Launch code of products of quantized rows, and torch's products where it cannot be built."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from sage_plugin import device
from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.build_error import build_failure
from sage_plugin.kernels.launch_config import Memo, compiler_options
from sage_plugin.kernels.linear.backends.torch_products import TorchProducts
from sage_plugin.kernels.linear.backends.triton.product_kernel import (
    ProductTensors,
    scaled_product_kernel,
)
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.linear.weight import QuantizedWeight
from sage_plugin.kernels.notice import warn_once
from sage_plugin.kernels.repeats import Repeats, repeats_of
from sage_plugin.schema import LinearLaunch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProductConfig:
    """What the product is compiled for.

    Attributes:
        BLOCK_M: rows of a tile; BLOCK_N columns; BLOCK_K channels of a step.
        GROUP_M: blocks of rows that go through the columns together.
        TMA: whether tiles are loaded through descriptors.
        FLATTEN: whether the loops over tiles and channels are one pipeline.
        EVEN_K: whether K is whole steps.
        INT8: whether sums are integers.
        SCALED: whether rows and weight have scales.
        BIAS: whether there is a bias.
        PER_TENSOR: whether rows and weight have one scale each.
        ASYMMETRIC: whether rows and weight have offsets.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    TMA: bool
    FLATTEN: bool
    EVEN_K: bool
    INT8: bool
    SCALED: bool
    BIAS: bool
    PER_TENSOR: bool = False
    ASYMMETRIC: bool = False


def products_of(
    x: torch.Tensor, weight: torch.Tensor, tiles: int, launch: LinearLaunch, **more: bool
) -> tuple[ProductConfig, int, Any, Any]:
    """Return what a product is compiled for, its programs, and its operands as it loads them.

    Args:
        x: `(M, K)` contiguous.
        weight: `(N, K)` contiguous, or `(E, N, K)` of groups.
        tiles: tiles of the output.
        launch: the launch config.
        more: the fields of the config that are not the launch's.
    """
    programs = tiles
    if launch.programs:
        facts = device.facts_of(x.device.type, x.device.index)
        programs = min(tiles, launch.programs * facts.sm_count)
    tma = launch.loads == "descriptor"
    config = ProductConfig(
        BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, BLOCK_K=launch.block_k,
        GROUP_M=launch.group_m, TMA=tma, FLATTEN=tma and programs < tiles,
        EVEN_K=x.shape[1] % launch.block_k == 0, INT8=x.dtype == torch.int8, **more,
    )  # fmt: skip
    if not tma:
        return config, programs, x, weight
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows = TensorDescriptor.from_tensor(x, [launch.block_m, launch.block_k])
    weight = weight.view(-1, weight.shape[-1])
    columns = TensorDescriptor.from_tensor(weight, [launch.block_n, launch.block_k])
    return config, programs, rows, columns


class TritonProducts:
    """Multiplies by our own kernel, with one launch config.

    Attributes:
        launch: the launch config.
        by_torch: whether the kernel could not be built, and torch multiplies.
    """

    def __init__(self, launch: LinearLaunch) -> None:
        self.launch, self.by_torch = launch, False

    def multiply(
        self,
        rows: QuantizedRows,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Multiply quantized rows with a weight, `(M, N)`."""
        if not self.by_torch:
            try:
                return multiply_triton(rows, weight, bias, out_dtype, self.launch)
            except Exception as error:  # of the compiler; others are raised again
                reason = build_failure(error)
                if reason is None:
                    raise
                self.by_torch = True
                warn_once(logger, "products by torch", "torch multiplies linears: %s", reason)
        return TorchProducts().multiply(rows, weight, bias, out_dtype)


_repeats: Memo[Repeats] = Memo(4096)


def multiply_triton(
    rows: QuantizedRows,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    launch: LinearLaunch,
) -> torch.Tensor:
    """Multiply quantized rows with a weight.

    Args:
        rows: `(M, K)`.
        weight: `(N, K)`.
        bias: `(N,)`.
        out_dtype: dtype of the output.
        launch: the launch config.

    Returns:
        `(M, N)`.
    """
    x = rows.data
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    tensors = (
        x, rows.scale, rows.offset, rows.sums, weight.data, weight.scale, weight.offset,
        weight.sums, bias,
    )  # fmt: skip
    if not x.is_cuda:
        return _multiply(*tensors, out_dtype, launch)[0]
    key = (
        x.shape, x.dtype, x.device, weight.out_features, rows.scale.dim(), rows.offset is None,
        None if bias is None else bias.dtype, out_dtype, launch,
    )  # fmt: skip
    known = repeats_of(_repeats, key)
    return known.repeat(tensors, x.device, _multiply, *tensors, out_dtype, launch)[0]


def _multiply(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_offset: torch.Tensor | None,
    x_sums: torch.Tensor | None,
    w: torch.Tensor,
    *rest: Any,  # noqa: ANN401
) -> tuple[torch.Tensor, None]:
    w_scale, w_offset, w_sums, bias, out_dtype, launch = rest
    rows, channels = x.shape
    columns = w.shape[0]
    out = torch.empty((rows, columns), dtype=out_dtype, device=x.device)
    tiles = -(-rows // launch.block_m) * -(-columns // launch.block_n)
    config, programs, *given = products_of(
        x, w, tiles, launch, SCALED=True, BIAS=bias is not None, PER_TENSOR=x_scale.dim() == 0,
        ASYMMETRIC=x_offset is not None,
    )  # fmt: skip
    epilogue = ProductTensors(out, x_scale, x_offset, x_sums, w_scale, w_offset, w_sums, bias)
    launch_graph.launch(
        scaled_product_kernel, programs, *given, epilogue, rows, columns, channels, programs,
        CONFIG=config, **compiler_options(launch),
    )  # fmt: skip
    return out, None
