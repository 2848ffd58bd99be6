"""Whether Q and K that were quantized with their norm and embedding are what two passes give."""

from __future__ import annotations

import torch

from sage_plugin.kernels.quantize.operands import QuantizedOperands

LARGEST_ERROR, MOST_ROWS = 0.1, 1 / 256
"""Of a row, of its length and beside a step of each channel; and the part of the rows that may have
more, where a rounding in 16 bits went the other way in a channel much larger than what is left of
the others without their mean."""
COMPARED_AT_ONCE = 1 << 22
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
    off = torch.zeros((), dtype=torch.int64, device=one.device)
    for a, of_a, b, of_b in parts:
        of_a, of_b = (torch.where(s.isfinite(), s, 0.0) for s in (of_a, of_b))  # else all zeros
        expected = of_b[..., None] * b.float()
        apart = (of_a[..., None] * a.float() - expected).norm(dim=-1)
        limit = LARGEST_ERROR * expected.norm(dim=-1) + of_b * one.shape[2] ** 0.5
        off += (~(apart <= limit)).sum()
    return int(off) <= MOST_ROWS * scale.numel()
