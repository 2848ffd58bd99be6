"""How attention kernels get a mask: per key, as one row, or tile by tile."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.attention.backends.triton.loop_kernels import MaskTensors
from sage_plugin.kernels.attention.backends.triton.mask_kernel import classify_mask_kernel
from sage_plugin.kernels.attention.mask import mask_kind
from sage_plugin.kernels.contract import AttentionParams
from sage_plugin.kernels.quantize.triton.key_mask import as_readable, broadcast_stride, by_key
from sage_plugin.schema import LaunchConfig

NO_MASK, KEY_TERMS, TILES, ONE_ROW = 0, 1, 2, 3
"""How a kernel gets its mask: not at all, a term a key, tiles by kind, or one row for all rows."""

LONGEST_UNIT = 16
"""Mask values side by side that are read at once at most."""

SHARING = 4
"""Heads that run side by side where they share a mask: their K, V and mask fit the L2 cache."""

BYTES_A_WARP = 2048
"""Of a tile; a warp keeps them in its registers while it looks at them."""

STAGES = 3
"""Tiles that are loaded ahead."""

LARGEST_STRIDE = 1 << 22
"""Offsets inside a mask's tile are 32-bit; masks with larger steps between rows are copied."""


@dataclass(frozen=True, slots=True)
class MaskArguments:
    """How an attention kernel reads the mask of a call.

    Attributes:
        mode: `NO_MASK`, `KEY_TERMS`, `TILES` or `ONE_ROW`.
        values: the mask, `None` where a kernel does not look at its values.
        bits: which keys each row of a tile sees, of tiles that are not plain; int32, see `key_bit`.
        lists: for each plane and row block four counts, the last one unused, and the tiles of each
            kind; int32.
        strides: strides of the mask, 0 where one entry serves all.
        planes: planes from one batch item to the next, and from one head to the next.
        unit: what divides the lengths and strides of `values`.
        group: heads that run side by side.
    """

    mode: int
    values: torch.Tensor | None = None
    bits: torch.Tensor | None = None
    lists: torch.Tensor | None = None
    strides: tuple[int, ...] = (0, 0, 0, 0)
    planes: tuple[int, int] = (0, 0)
    unit: int = 1
    group: int = 1

    @classmethod
    def of(
        cls, problem: AttentionParams, *, seq_q: int, launch: LaunchConfig, terms_by_key: bool
    ) -> MaskArguments:
        """Make the arguments of a call; a mask of rows and keys takes one launch alone."""
        mask = problem.mask
        if mask is None:
            return cls(NO_MASK)
        if terms_by_key and by_key(mask):
            return cls(KEY_TERMS)
        if max(mask.stride(2), mask.stride(3)) >= LARGEST_STRIDE:
            mask = mask.contiguous()
        strides = (*(broadcast_stride(mask, dim) for dim in range(3)), mask.stride(3))
        if mask_kind(mask) == "key_bias":
            return cls(ONE_ROW, as_readable(mask), strides=strides)
        unit = _unit(mask, strides)
        bits, lists = _classified(mask, strides, unit, problem, seq_q, launch)
        batch, heads = mask.shape[:2]
        is_bool = mask.dtype == torch.bool
        return cls(
            TILES,
            None if is_bool else mask,
            bits,
            lists,
            strides,
            planes=(heads if batch > 1 else 0, 1 if heads > 1 else 0),
            unit=1 if is_bool else unit,
            group=1 if heads > 1 else SHARING,
        )

    def tensors(self) -> MaskTensors:
        """What a kernel gets."""
        return MaskTensors(self.values, self.bits, self.lists)


def _unit(mask: torch.Tensor, strides: tuple[int, ...]) -> int:
    """A power of two that divides the keys and the strides of a mask with keys side by side."""
    if mask.stride(3) != 1:
        return 1
    return math.gcd(LONGEST_UNIT, mask.shape[3], *strides[:3])


def _classified(
    mask: torch.Tensor,
    strides: tuple[int, ...],
    unit: int,
    problem: AttentionParams,
    seq_q: int,
    launch: LaunchConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits and lists of a mask of rows and keys."""
    block_m, block_n = launch.block_m, launch.block_n
    batch, heads, _, seq_k = mask.shape
    row_blocks, key_count = -(-seq_q // block_m), -(-seq_k // block_n)
    rows = batch * heads * row_blocks
    words = rows * key_count * block_m * max(1, block_n // 32)
    bits = launch_graph.empty(mask.device, torch.int32, words)
    lists = launch_graph.empty(mask.device, torch.int32, rows * (4 + 3 * key_count) + 1)
    warps = max(4, min(16, block_m * block_n * mask.element_size() // BYTES_A_WARP))
    launch_graph.launch(
        classify_mask_kernel, rows, as_readable(mask), bits, lists, *strides, heads, seq_q, seq_k,
        row_blocks, problem.left, problem.right,
        BLOCK_M=block_m, BLOCK_N=block_n, UNIT=unit, BOOL=mask.dtype == torch.bool,
        LEFT=problem.left >= 0, RIGHT=problem.right >= 0, STAGES=STAGES, num_warps=warps,
    )  # fmt: skip
    return bits, lists
