"""Masks of every form for the rows of the matrix, made from the shape of a call."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tests.kernels.calls import Shape

MaskOf = Callable[[Shape], torch.Tensor]

FORMS: dict[str, Callable[[Shape], tuple[int, ...]]] = {
    "rows and keys": lambda s: (s.seq_q, s.seq_k),
    "keys": lambda s: (s.seq_k,),
    "keys of each item": lambda s: (s.batch, 1, 1, s.seq_k),
    "rows of each item": lambda s: (s.batch, 1, s.seq_q, s.seq_k),
    "rows of each head": lambda s: (s.batch, s.heads_q, s.seq_q, s.seq_k),
    "keys of each head": lambda s: (1, s.heads_q, 1, s.seq_k),
    "rows alone": lambda s: (s.heads_q, s.seq_q, 1),
}


def keeping(form: str, seed: int = 1) -> MaskOf:
    """A bool mask that hides two keys of five, but never the one in the middle."""

    def make(shape: Shape) -> torch.Tensor:
        size = FORMS[form](shape)
        keep = torch.rand(size, generator=torch.Generator().manual_seed(seed)) > 0.4
        if size[-1] > 1:
            keep[..., size[-1] // 2] = True
        return keep

    return make


def bias(form: str, seed: int = 1, dtype: torch.dtype = torch.float32) -> MaskOf:
    """A float mask that adds to what it keeps; it hides by -inf and by the lowest number."""

    def make(shape: Shape) -> torch.Tensor:
        keep = keeping(form, seed)(shape)
        made = 2 * torch.randn(keep.shape, generator=torch.Generator().manual_seed(seed + 1))
        made[~keep] = -math.inf
        made[~keep & (torch.arange(keep.shape[-1]) % 2 == 0)] = torch.finfo(torch.float32).min
        return made.to(dtype)

    return make


def floats(mask_of: MaskOf, hides: float = -math.inf, dtype: torch.dtype = torch.float32) -> MaskOf:
    """The float mask that means the same as a bool mask."""

    def make(shape: Shape) -> torch.Tensor:
        mask = mask_of(shape)
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, hides)

    return make


def expanded(mask_of: MaskOf) -> MaskOf:
    """The same mask with strides of 0, as `expand` makes it."""
    return lambda s: mask_of(s).expand(s.batch, s.heads_q, s.seq_q, s.seq_k)


def holes(shape: Shape) -> torch.Tensor:
    """A row that sees nothing, rows that see no block but the last."""
    mask = torch.ones(shape.seq_q, shape.seq_k, dtype=torch.bool)
    mask[3] = False
    mask[7:9, : shape.seq_k // 2] = False
    mask[12:, : shape.seq_k // 2] = False
    return mask


def nobody_first(shape: Shape) -> torch.Tensor:
    """Keys that the first item does not see at all."""
    mask = torch.ones(shape.batch, 1, 1, shape.seq_k, dtype=torch.bool)
    mask[0] = False
    return mask


def left_padding(shape: Shape) -> torch.Tensor:
    """The first keys of the last item are padding, past the diagonal of its first rows."""
    mask = torch.ones(shape.batch, 1, 1, shape.seq_k, dtype=torch.bool)
    mask[-1, ..., : shape.seq_k // 2 + 5] = False
    return mask


def padding(shape: Shape) -> torch.Tensor:
    """The last nine keys of the first item are padding."""
    mask = torch.ones(shape.batch, 1, 1, shape.seq_k, dtype=torch.bool)
    mask[0, ..., -9:] = False
    return mask


def all_but_last(form: str) -> MaskOf:
    """Hide the last key from all."""

    def make(shape: Shape) -> torch.Tensor:
        mask = torch.ones(FORMS[form](shape), dtype=torch.bool)
        mask[..., -1] = False
        return mask

    return make


def every_second(form: str) -> MaskOf:
    """Minus two for every second key."""

    def make(shape: Shape) -> torch.Tensor:
        made = torch.zeros(FORMS[form](shape))
        made[..., ::2] = -2.0
        return made

    return make


def constant(value: float, dtype: torch.dtype = torch.float32) -> MaskOf:
    """One number for all keys."""
    return lambda s: torch.full((s.seq_k,), value).to(dtype)


def staircase(dtype: torch.dtype) -> MaskOf:
    """Rows hidden by -inf, by the lowest number of a type, by neither, and by halves."""

    def make(shape: Shape) -> torch.Tensor:
        lowest, half = torch.finfo(dtype).min, shape.seq_k // 2
        made = torch.zeros(shape.seq_q, shape.seq_k)
        made[0] = -math.inf
        made[1] = lowest
        made[2] = -1e4
        made[3, :half] = -math.inf
        made[4, :half], made[4, half:] = lowest, -3e4
        return made.to(dtype)

    return make


def adding_tiles(shape: Shape) -> torch.Tensor:
    """Tiles of a float mask, of which some add to scores and others only hide."""
    mask = floats(tiles(each=True), torch.finfo(torch.float32).min)(shape)
    rows, keys = slice(20, 50), slice(32, 96)
    size = mask[..., rows, keys].shape
    mask[..., rows, keys] += 3 * torch.randn(size, generator=torch.Generator().manual_seed(3))
    return mask


def without_thirds(shape: Shape) -> torch.Tensor:
    """Every third key is hidden, but for one row that sees nothing else."""
    mask = torch.ones(shape.seq_q, shape.seq_k, dtype=torch.bool)
    mask[:, ::3] = False
    mask[1, ::3] = True
    return mask


def threshold(shape: Shape) -> torch.Tensor:
    """Biases that are just not low enough to hide, beside some that are."""
    made = torch.full((shape.seq_k,), -0.9e38)
    made[5:] = -1.1e38
    return made


def tiles(each: bool = False, tile: int = 32) -> MaskOf:
    """Hidden, plain and mixed tiles, a third each, for all or for each head of each item."""

    def make(shape: Shape) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        planes = (shape.batch, shape.heads_q) if each else (1, 1)
        grid = (*planes, -(-shape.seq_q // tile), -(-shape.seq_k // tile))
        kind = torch.randint(0, 3, grid, generator=generator)
        kind = kind.repeat_interleave(tile, 2).repeat_interleave(tile, 3)
        kind = kind[:, :, : shape.seq_q, : shape.seq_k]
        dots = torch.rand(kind.shape, generator=generator) > 0.4
        return (
            (kind == 1) | ((kind == 2) & dots) | (torch.arange(shape.seq_k) == 0)
        )  # a key for every row

    return make
