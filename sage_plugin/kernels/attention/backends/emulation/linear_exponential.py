"""The linear exponential in torch: FP8 weights whose bits are the linear part of their exponent.

An e4m3 number of magnitude 2^x has bits near `8 * (x + 7)`, exactly so for powers of two (after
Schraudolph, Neural Computation 11, 1999). Rounding that line instead of 2^x takes no special
function unit, and adds to an error of 2.7 % of each weight 1.7 % of its own.
"""

from __future__ import annotations

import torch

from sage_plugin.kernels.attention.backends.emulation.online_softmax import Weights, rounded_weights
from sage_plugin.kernels.contract import AttentionParams
from sage_plugin.kernels.quantize.recipe import LINEAR_SHIFT
from sage_plugin.schema import LaunchConfig

EIGHTHS = 8
GROUP_KEYS = 16
"""Keys of a block that go by one rule together."""

_BITS_OF_ONE = 56.0
_LARGEST_BITS = 126.0


def linear_exp2(x: torch.Tensor) -> torch.Tensor:
    """FP8 values of `2^x` by the linear rule, in fp32; NaN becomes 0.

    Example:
        >>> linear_exp2(torch.tensor([3.0, -100.0])).tolist()
        [8.0, 0.0]
    """
    bits = torch.ceil(torch.nan_to_num(x, nan=-1e3) * 8 + (_BITS_OF_ONE - LINEAR_SHIFT - 0.5))
    bits = bits.clamp(0.0, _LARGEST_BITS).to(torch.uint8)
    return bits.view(torch.float8_e4m3fn).float()


def linear_keys(block_n: int, exp_linear: int) -> int:
    """How many keys of a block, its last ones, go by the linear rule."""
    return exp_linear * block_n // EIGHTHS // GROUP_KEYS * GROUP_KEYS


def linear_weights(
    problem: AttentionParams, launch: LaunchConfig, p_dtype: torch.dtype, *, seq_q: int, seq_k: int
) -> Weights:
    """Weights as a Hopper kernel with `exp_linear` makes them; row sums are of rounded ones.

    Keys go by the linear rule in blocks that all rows of a program see whole, without a mask.

    Args:
        problem: the call, of one sequence.
        launch: its launch config.
        p_dtype: FP8 type of the weights.
        seq_q: query length.
        seq_k: key length.
    """
    exact = rounded_weights(p_dtype)
    keys = linear_keys(launch.block_n, launch.exp_linear)

    def weigh(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        p, _ = exact(x, block)
        rows = torch.arange(x.shape[-2], device=x.device) % max(seq_q, 1)
        whole = _blocks_seen_whole(rows, problem, launch, seq_q=seq_q, seq_k=seq_k)
        if problem.mask is None and keys:
            last = torch.where(
                (block < whole)[:, None], linear_exp2(x[..., -keys:]), p[..., -keys:]
            )
            p = torch.cat((p[..., :-keys], last), -1)
        return p, p

    return weigh


def _blocks_seen_whole(
    rows: torch.Tensor, problem: AttentionParams, launch: LaunchConfig, *, seq_q: int, seq_k: int
) -> torch.Tensor:
    """How many key blocks all rows of each row's program see whole."""
    if problem.right < 0:
        return torch.full_like(rows, seq_k // launch.block_n)
    first = torch.div(rows, launch.block_m, rounding_mode="floor") * launch.block_m
    seen = (first + 1 + seq_k - seq_q + problem.right).clamp(0, seq_k)
    return torch.div(seen, launch.block_n, rounding_mode="floor")
