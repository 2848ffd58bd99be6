"""Torch twins of the quantisers: the same granules, scales and rounding, in plain tensor code."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sage_plugin.kernels.quant.recipe import FP16_HEADROOM, LOG2E, TINY, Recipe


@dataclass(frozen=True, slots=True)
class QuantisedQ:
    """Quantised queries.

    Attributes:
        values: `(B, Hq, Sq, D)` in the recipe's QK type.
        scale: `(B, Hq, Sq)` fp32, one a row.
    """

    values: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, slots=True)
class QuantisedK:
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
class QuantisedV:
    """Quantised values, padded with zeros to whole blocks.

    Attributes:
        values: `(B, Hk, blocks, block_n, D)` in the recipe's PV type.
        scale: `(B, Hk, D)` fp32, one a channel.
        mean: `(B, Hk, D)` fp32, what was subtracted from every value (zero without smoothing).
    """

    values: torch.Tensor
    scale: torch.Tensor
    mean: torch.Tensor


def quantise_q(q: torch.Tensor, *, scale: float, recipe: Recipe) -> QuantisedQ:
    """Quantise queries, one scale a row; `scale` and log2 e are folded in before.

    Source: SageAttention (arXiv 2410.02367) section 4.3, with rows instead of blocks as granules.
    """
    x = q.float() * (scale * LOG2E)
    amax = x.abs().amax(-1).clamp_min(TINY)
    values = round_to(x * (recipe.qk_max / amax)[..., None], recipe.qk_dtype)
    return QuantisedQ(values, amax / recipe.qk_max)


def quantise_k(k: torch.Tensor, *, block_n: int, smooth: bool, recipe: Recipe) -> QuantisedK:
    """Quantise keys, one scale a block of `block_n`, after removing their mean over the sequence.

    Source: SageAttention (arXiv 2410.02367) section 4.2: softmax does not see a constant added to
    all scores of a row, so K may lose its mean.
    """
    x = k.float()
    mean = x.mean(2) if smooth else torch.zeros_like(x[:, :, 0])
    blocks = _blocks(x - mean[:, :, None], block_n)
    amax = blocks.abs().amax((3, 4)).clamp_min(TINY)
    values = round_to(blocks * (recipe.qk_max / amax)[..., None, None], recipe.qk_dtype)
    return QuantisedK(values, amax / recipe.qk_max, mean)


def quantise_v(v: torch.Tensor, *, block_n: int, smooth: bool, recipe: Recipe) -> QuantisedV:
    """Quantise values, one scale a channel, after removing their mean over the sequence.

    The mean is added back to the output, which is exact because the weights of a row sum to one.
    Source: SageAttention2 (arXiv 2411.10958) section 3.3.
    """
    x = v.float()
    mean = x.mean(2) if smooth else torch.zeros_like(x[:, :, 0])
    highest, lowest = x.amax(2) - mean, x.amin(2) - mean
    amax = torch.maximum(highest.abs(), lowest.abs())
    if recipe.pv == "fp16":
        scale = (amax / FP16_HEADROOM).clamp_min(1.0)
    else:
        scale = amax.clamp_min(TINY) / recipe.fp8_max
    values = round_to(_blocks((x - mean[:, :, None]) / scale[:, :, None], block_n), recipe.pv_dtype)
    return QuantisedV(values, scale, mean)


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
