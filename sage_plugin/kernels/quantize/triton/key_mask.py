"""What a mask says of whole keys, for quantisers that read K and V once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.quantize.operands import QuantizedOperands
from sage_plugin.kernels.quantize.triton.statistics_kernels import seen_keys_kernel

SEEN_ROWS, SEEN_KEYS, SEEN_WARPS = 32, 128, 4


@dataclass(frozen=True, slots=True)
class KeyMask:
    """What a mask says of whole keys: a bias for each, or whether any row sees it.

    Attributes:
        values: `(B or 1, Hk or 1, Sk)`, uint8 or float; `None` without a mask.
        strides: strides of batch, key head and key, 0 where one serves all.
    """

    values: torch.Tensor | None
    strides: tuple[int, int, int]

    @classmethod
    def of(cls, operands: QuantizedOperands) -> KeyMask:
        """The key mask of a call."""
        mask = operands.problem.mask
        if mask is None:
            return cls(None, (0, 0, 0))
        readable = as_readable(mask)
        batch, heads, _, seq_k = readable.shape
        if by_key(mask):
            return cls(readable, (broadcast_stride(mask, 0), 0, mask.stride(3)))
        ratio = operands.heads_q // operands.heads_k if heads > 1 else 1
        heads //= ratio
        seen = launch_graph.empty(mask.device, torch.uint8, batch, heads, seq_k)
        blocks = -(-seq_k // SEEN_KEYS)
        problem = operands.problem
        launch_graph.launch(
            seen_keys_kernel, batch * heads * blocks,
            readable, seen, mask.stride(0), mask.stride(1), broadcast_stride(mask, 2),
            mask.stride(3), heads, ratio, operands.seq_q, seq_k, blocks, problem.left,
            problem.right, ROWS=SEEN_ROWS, BLOCK_N=SEEN_KEYS, LEFT=problem.left >= 0,
            RIGHT=problem.right >= 0, num_warps=SEEN_WARPS,
        )  # fmt: skip
        return cls(seen, (broadcast_stride(seen, 0), broadcast_stride(seen, 1), 1))


def by_key(mask: torch.Tensor) -> bool:
    """Whether a mask is one bias a key, the same for all heads: the keys' terms then hold it."""
    return mask.shape[1] == 1 and mask.shape[2] == 1


def as_readable(mask: torch.Tensor) -> torch.Tensor:
    """A mask as kernels read it: bool as bytes."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def broadcast_stride(tensor: torch.Tensor, dim: int) -> int:
    """Stride of a dimension, 0 where it has one entry for all."""
    return 0 if tensor.shape[dim] == 1 else tensor.stride(dim)
