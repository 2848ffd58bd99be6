"""What quantizes the rows of an activation in eager mode, by device."""

from __future__ import annotations

import logging

import torch

from sage_plugin import device
from sage_plugin.kernels.build_error import build_failure
from sage_plugin.kernels.linear.rows.prologue import NO_PROLOGUE, Prologue
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows, quantized_rows
from sage_plugin.kernels.linear.rows.row_format import RowFormat
from sage_plugin.kernels.notice import warn_once

logger = logging.getLogger(__name__)


class RowQuantizer:
    """Quantizes rows in Triton, or by torch's operations where that cannot be.

    Attributes:
        by_torch: whether torch's operations do it.
    """

    def __init__(self, *, by_torch: bool) -> None:
        self.by_torch = by_torch

    def __call__(
        self,
        x: torch.Tensor,
        form: RowFormat,
        smooth: torch.Tensor | None = None,
        prologue: Prologue = NO_PROLOGUE,
        kept: torch.Tensor | None = None,
        copies: torch.Tensor | None = None,
    ) -> QuantizedRows:
        """Quantize `(..., K)` to `(M, K)` rows; see `rows.quantized_rows`.

        `copies` are `(M, C)` places that each row goes to.
        """
        if not self.by_torch:
            try:
                from sage_plugin.kernels.linear.backends.triton import rows

                if rows.takes_rows(x.shape[-1], prologue):
                    return rows.quantize_rows_triton(x, form, smooth, prologue, kept, copies)
            except Exception as error:  # of the compiler; others are raised again
                reason = build_failure(error)
                if reason is None:
                    raise
                self.by_torch = True
                warn_once(
                    logger, "rows by torch", "rows are quantized by torch's operations: %s", reason
                )
        made = quantized_rows(x, form, smooth, prologue, kept).flat()
        return made if copies is None else made.copied(copies)


IN_TRITON, BY_TORCH = RowQuantizer(by_torch=False), RowQuantizer(by_torch=True)


def quantizer_of(where: torch.device, backend: str = "auto") -> RowQuantizer:
    """Return the quantizer of a device.

    Args:
        where: the device.
        backend: `"triton"` asks for ours on a CPU too, whose interpreter runs it.
    """
    if backend == "triton" or (where.type == "cuda" and device.triton_version()):
        return IN_TRITON
    return BY_TORCH
