"""Whether Q and K that were quantized with their norm and embedding are what two passes give."""

from __future__ import annotations

import torch

from sage_plugin.kernels.quantize.operands import QuantizedOperands

LARGEST_ERROR = 0.1
"""Of a row, of its length. A rounding that goes the other way moves few of its channels by a step,
which is an eighth in FP8."""
COMPARED_AT_ONCE = 1 << 24
"""Values that are compared at once."""


def operands_agree(one: QuantizedOperands, other: QuantizedOperands) -> bool:
    """Whether all rows of Q and K are the same but for rounding; waits for the device."""
    block = other.launch_config.block_n
    return _near(one.q8, one.q_scale, other.q8, other.q_scale) and _near(
        one.k8, one.k_scale.repeat_interleave(block, -1), other.k8,
        other.k_scale.repeat_interleave(block, -1),
    )  # fmt: skip


def _near(
    one: torch.Tensor, scale: torch.Tensor, other: torch.Tensor, other_scale: torch.Tensor
) -> bool:
    rows = max(1, COMPARED_AT_ONCE // max(1, one.shape[0] * one.shape[2]))
    parts = zip(*(x.split(rows, 1) for x in (one, scale, other, other_scale)), strict=True)
    for a, of_a, b, of_b in parts:
        found, expected = _values(a, of_a), _values(b, of_b)
        apart, length = (x.square().sum(-1).sqrt() for x in (found - expected, expected))
        if not bool((apart <= LARGEST_ERROR * length).all()):
            return False
    return True


def _values(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows in fp32; those that are not finite are zeros."""
    return torch.where(scale.isfinite(), scale, 0.0)[..., None] * x.float()
