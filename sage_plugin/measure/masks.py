"""Drawn masks to judge and time with."""

from __future__ import annotations

import torch

from sage_plugin.errors import UsageError
from sage_plugin.schema import MASK_KINDS, CallShape

BLOCKS = 8
LARGEST_BLOCK = 128


def synthetic_mask(
    shape: CallShape, *, device: torch.device | str, seed: int = 0
) -> torch.Tensor | None:
    """Draw a bool mask of the call's kind, the same on every device; `None` for no mask.

    `key_bias` is padding, (B, 1, 1, Sk): each batch item keeps its first keys, a number drawn
    evenly from half of them to all but one. `dense` is (B, 1, Sq, Sk): square blocks, an eighth of
    the shorter side and at most 128 wide, are visible with even odds, and those that hold a row's
    own key (bottom-right aligned) always, so that no row is without a key.
    """
    if shape.mask_kind not in MASK_KINDS:
        raise UsageError(f"mask {shape.mask_kind!r}: allowed are {', '.join(MASK_KINDS)}")
    generator = torch.Generator().manual_seed(seed)
    if shape.mask_kind == "none":
        return None
    if shape.mask_kind == "key_bias":
        least = max(1, shape.seq_k // 2)
        beyond = max(least + 1, shape.seq_k)
        kept = torch.randint(least, beyond, (shape.batch,), generator=generator)
        keys = torch.arange(shape.seq_k, device=device)
        return (keys < kept.to(device)[:, None])[:, None, None]
    mask = torch.empty((shape.batch, 1, shape.seq_q, shape.seq_k), dtype=torch.bool, device=device)
    for item in mask:
        blocks = _blocks(shape, generator).to(device)
        item[0] = blocks.repeat_interleave(_block(shape), 1)[:, : shape.seq_k]
    return mask


def _block(shape: CallShape) -> int:
    return max(1, min(LARGEST_BLOCK, shape.seq_q // BLOCKS, shape.seq_k // BLOCKS))


def _blocks(shape: CallShape, generator: torch.Generator) -> torch.Tensor:
    """`(Sq, blocks of keys)` bool: what each row sees of each block."""
    block = _block(shape)
    size = (-(-shape.seq_q // block), -(-shape.seq_k // block))
    visible = torch.randint(0, 2, size, generator=generator, dtype=torch.uint8).bool()
    rows = torch.arange(shape.seq_q)
    own = (rows + (shape.seq_k - shape.seq_q)).clamp(0, shape.seq_k - 1)
    seen = visible[rows // block]
    seen[rows, own // block] = True
    return seen
