"""Torch twins of the quantisers: the same granules, scales and rounding, in plain tensor code."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sage_plugin.kernels.quantize.hadamard import rotated
from sage_plugin.kernels.quantize.recipe import FP16_FLOOR, FP16_HEADROOM, LOG2E, TINY, Recipe

HUGE = 1e37
"""Channels with larger values keep their mean: subtracting it could overflow."""


@dataclass(frozen=True, slots=True)
class QuantizedQ:
    """Quantised queries.

    Attributes:
        values: `(B, Hq, Sq, D)` in the recipe's QK type.
        scale: `(B, Hq, Sq)` fp32, one a row (the same in each granule); NaN for rows with NaN or
            infinite values.
    """

    values: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, slots=True)
class QuantizedK:
    """Quantised keys, padded with zeros to whole blocks.

    Attributes:
        values: `(B, Hk, blocks, block_n, D)` in the recipe's QK type.
        scale: `(B, Hk, blocks)` fp32, one a block.
        mean: `(B, Hk, D)` fp32, what was subtracted from every key (zero without smoothing).
    """

    values: torch.Tensor
    scale: torch.Tensor
    mean: torch.Tensor


@dataclass(frozen=True, slots=True)
class QuantizedV:
    """Quantised values, padded with zeros to whole blocks.

    Attributes:
        values: `(B, Hk, blocks, block_n, D)` in the recipe's PV type.
        scale: `(B, Hk, D)` fp32, one a channel.
        mean: `(B, Hk, D)` fp32, what was subtracted from every value (zero without smoothing).
        owed: `(B, Hk, D)` fp32, what the output needs back: the mean, less what FP8 values gained
            by rounding on average.
    """

    values: torch.Tensor
    scale: torch.Tensor
    mean: torch.Tensor
    owed: torch.Tensor


def quantize_q(
    q: torch.Tensor, *, scale: float, recipe: Recipe, hadamard: int = 0, granule: int = 1
) -> QuantizedQ:
    """Quantise queries, one scale a granule of rows; `scale` and log2 e are folded in before.

    Source: SageAttention (arXiv 2410.02367) section 4.3, where a granule is a block.

    Args:
        q: `(B, Hq, Sq, D)`.
        scale: factor of the scores.
        recipe: number formats.
        hadamard: block of channels that is rotated, as K's is; 0 for none.
        granule: rows that share a scale, counted from the first row.
    """
    x = q.float() * (scale * LOG2E)
    finite = torch.isfinite(x).all(-1)
    x = rotated(x.where(finite[..., None], 0.0), hadamard)
    amax = x.abs().amax(-1).clamp_min(TINY)
    if granule > 1:
        amax = _blocks(amax[..., None], granule).amax((3, 4)).repeat_interleave(granule, 2)
        amax = amax[:, :, : q.shape[2]]
    values = round_to(x * (recipe.qk_max / amax)[..., None], recipe.qk_dtype)
    return QuantizedQ(values, (amax / recipe.qk_max).where(finite, math.nan))


def quantize_k(
    k: torch.Tensor,
    *,
    block_n: int,
    smooth: bool,
    recipe: Recipe,
    hadamard: int = 0,
    alive: torch.Tensor | None = None,
    poison: torch.Tensor | None = None,
) -> QuantizedK:
    """Quantise keys, one scale a block of `block_n`, after removing their mean over the sequence.

    Source: SageAttention (arXiv 2410.02367) section 4.2: softmax does not see a constant added to
    all scores of a row, so K may lose its mean.

    Args:
        k: `(B, Hk, Sk, D)`.
        block_n: keys of a block.
        smooth: whether K loses its mean.
        recipe: number formats.
        hadamard: block of channels that is rotated after the mean is gone; 0 for none.
        alive: `(B or 1, Hk or 1, Sk)` bool of the keys that count, `None` for all; others become 0
            and are part of no mean or scale.
        poison: `(B, Hk, Sk)` bool of `poisoned_keys`, `None` for none; they become 0, too.
    """
    x = k.float()
    mean = _mean(x, alive) if smooth else torch.zeros_like(x[:, :, 0])
    x = rotated(_kept(x - mean[:, :, None], alive, poison), hadamard)
    blocks = _blocks(x, block_n)
    amax = blocks.abs().amax((3, 4)).clamp_min(TINY)
    values = round_to(blocks * (recipe.qk_max / amax)[..., None, None], recipe.qk_dtype)
    return QuantizedK(values, amax / recipe.qk_max, mean)


def quantize_v(
    v: torch.Tensor,
    *,
    block_n: int,
    smooth: bool,
    recipe: Recipe,
    alive: torch.Tensor | None = None,
    poison: torch.Tensor | None = None,
) -> QuantizedV:
    """Quantise values, one scale a channel, after removing their mean over the sequence.

    The mean is added back to the output, which is exact because the weights of a row sum to one.
    So is, with its sign changed, the mean rounding error of FP8 values: a mean near zero breaks the
    ties of 16-bit inputs all to one side, and broad weights carry that into every row.
    `alive` and `poison` are as in `quantize_k`.
    Source: SageAttention2 (arXiv 2411.10958) section 3.3.
    """
    x = v.float()
    mean = _mean(x, alive) if smooth else torch.zeros_like(x[:, :, 0])
    x = x - mean[:, :, None]
    amax = x.abs().where(_counted(x, alive), 0.0).amax(2)
    if recipe.pv == "fp16":
        fits = (amax >= FP16_FLOOR) & (amax <= FP16_HEADROOM)
        scale = (amax.clamp_min(TINY) / FP16_HEADROOM).masked_fill(fits, 1.0)
    else:
        scale = amax.clamp_min(TINY) / recipe.fp8_max
    x = _blocks(_kept(x / scale[:, :, None], alive, poison), block_n)
    values = round_to(x, recipe.pv_dtype)
    if recipe.pv == "fp16":
        return QuantizedV(values, scale, mean, mean)
    gained = (values.float() - x).sum((2, 3)) / _count(v, alive)
    return QuantizedV(values, scale, mean, mean - gained * scale)


def poisoned_keys(
    k: torch.Tensor, v: torch.Tensor, alive: torch.Tensor | None = None
) -> torch.Tensor:
    """`(B, Hk, Sk)` bool of the keys that someone sees and whose K or V row is not finite.

    Example:
        >>> k = torch.tensor([0.0, torch.nan]).view(1, 1, 2, 1)
        >>> poisoned_keys(k, k).tolist()
        [[[False, True]]]
    """
    bad = ~(torch.isfinite(k).all(-1) & torch.isfinite(v).all(-1))
    return bad if alive is None else bad & alive


def _counted(x: torch.Tensor, alive: torch.Tensor | None) -> torch.Tensor:
    """Elements that means and scales are taken from: finite ones of keys that someone sees."""
    finite = torch.isfinite(x)
    return finite if alive is None else finite & alive[..., None]


def _mean(x: torch.Tensor, alive: torch.Tensor | None) -> torch.Tensor:
    """Sum of what counts over the number of keys that someone sees; 0 where there are none."""
    counted = x.where(_counted(x, alive), 0.0)
    mean = (counted.double().sum(2) / _count(x, alive)).float()
    return mean.where(counted.abs().amax(2) < HUGE, 0.0)


def _count(x: torch.Tensor, alive: torch.Tensor | None) -> torch.Tensor | int:
    """Keys that someone sees, at least one."""
    return x.shape[2] if alive is None else alive.sum(-1).clamp_min(1)[..., None]


def _kept(x: torch.Tensor, alive: torch.Tensor | None, poison: torch.Tensor | None) -> torch.Tensor:
    """Rows with those that nobody sees, and the poisoned ones, set to zero."""
    if alive is not None:
        x = x.where(alive[..., None], 0.0)
    return x if poison is None else x.masked_fill(poison[..., None], 0.0)


def round_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to the nearest value of a type, ties to even, clamped to its range before the cast."""
    if dtype == torch.int8:
        return x.round().clamp_(-127, 127).to(dtype)
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def _blocks(x: torch.Tensor, block_n: int) -> torch.Tensor:
    batch, heads, seq, channels = x.shape
    count = -(-seq // block_n)
    padded = torch.nn.functional.pad(x, (0, 0, 0, count * block_n - seq))
    return padded.view(batch, heads, count, block_n, channels)
