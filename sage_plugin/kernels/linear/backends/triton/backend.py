"""The Triton backend of linears, and torch's products behind it where it cannot be built."""

from __future__ import annotations

import logging

import torch

from sage_plugin.kernels.build_error import build_failure
from sage_plugin.kernels.linear.backends.torch_products import TorchProducts
from sage_plugin.kernels.linear.backends.triton.products import multiply_triton
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.linear.weight import QuantizedWeight
from sage_plugin.kernels.notice import warn_once
from sage_plugin.schema import LinearLaunch

logger = logging.getLogger(__name__)


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
