"""What to time where nothing was recorded: preset shapes and synthetic tensors.

Tensors are always indexed `(batch, heads, sequence, channels)`; they lie in memory as
`CallShape.layout` says, so that a transpose of a `bshd` tensor costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from sage_plugin.errors import UsageError
from sage_plugin.schema import CallShape

K_CHANNEL_BIAS = 3.0
OUTLIER_CHANNELS = 2
OUTLIER_SCALE = 40.0
DISTRIBUTIONS = ("normal", "biased", "drift", "outlier")

_PRESETS = {
    "cogvideox-2b": (2, 30, 17776, 64),
    "wan-720p": (1, 5, 75600, 128),
    "hunyuan-540p": (1, 24, 16452, 128),
    "hunyuan-720p": (1, 3, 118808, 128),
    "wan-480p": (2, 2, 29760, 128),
}

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Drawer = Callable[..., torch.Tensor]


def presets() -> dict[str, CallShape]:
    """Return the five video shapes by name, as one device calls them."""
    return {name: self_attention(*numbers) for name, numbers in _PRESETS.items()}


def self_attention(
    batch: int, heads: int, seq: int, head_dim: int, *, dtype: str = "bfloat16"
) -> CallShape:
    """Return the shape of a plain self-attention call."""
    return CallShape(
        batch=batch,
        heads_q=heads,
        heads_k=heads,
        seq_q=seq,
        seq_k=seq,
        head_dim=head_dim,
        dv=head_dim,
        dtype=dtype,
        causal=False,
        mask_kind="none",
        layout="bhsd",
        scale=1 / math.sqrt(head_dim),
    )


def synthetic(
    shape: CallShape,
    *,
    device: torch.device | str,
    seed: int = 0,
    distribution: str = "normal",
) -> Tensors:
    """Draw Q, K and V head by head in fp32 on the device, and round them to the dtype.

    `normal` is N(0, 1). `biased` adds to V a bias N(0, 1) and to K a bias 3 N(0, 1) of each
    channel, as video models do. `drift` adds 1 to the first half of V and -1 to the second.
    `outlier` multiplies two channels of K by 40.

    Args:
        shape: the call.
        device: where to draw.
        seed: of the draw.
        distribution: one of `DISTRIBUTIONS`.

    Returns:
        `(q, k, v)`, indexed bhsd.

    Raises:
        UsageError: the distribution or the dtype is unknown.

    Example:
        >>> q, k, v = synthetic(self_attention(1, 2, 16, 8), device="cpu", distribution="drift")
        >>> q.shape, v.dtype
        (torch.Size([1, 2, 16, 8]), torch.bfloat16)
    """
    dtype, draw = torch_dtype(shape.dtype), drawer(device, seed, distribution)

    def make(
        heads: int, seq: int, width: int, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        rows = [change(draw(seq, width)).to(dtype) for _ in range(shape.batch * heads)]
        return in_layout(torch.stack(rows).view(shape.batch, heads, seq, width), shape.layout)

    q = make(shape.heads_q, shape.seq_q, shape.head_dim, lambda x: x)
    k = make(shape.heads_k, shape.seq_k, shape.head_dim, _k_change(distribution, draw))
    v = make(shape.heads_k, shape.seq_k, shape.dv, _v_change(distribution, draw))
    return q, k, v


def drawer(device: torch.device | str, seed: int, distribution: str) -> Drawer:
    """Return what draws N(0, 1) in fp32, of a size, one tensor after another.

    Raises:
        UsageError: the distribution that this is for is unknown.
    """
    if distribution not in DISTRIBUTIONS:
        raise UsageError(
            f"input distribution {distribution!r}: allowed are {', '.join(DISTRIBUTIONS)}"
        )
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *size: torch.randn(*size, device=device, generator=generator, dtype=torch.float32)


def _k_change(distribution: str, draw: Drawer) -> Callable[[torch.Tensor], torch.Tensor]:
    if distribution == "biased":
        return lambda x: x + K_CHANNEL_BIAS * draw(1, x.shape[-1])
    if distribution == "outlier":

        def scaled(x: torch.Tensor) -> torch.Tensor:
            x[:, :OUTLIER_CHANNELS] *= OUTLIER_SCALE
            return x

        return scaled
    return lambda x: x


def _v_change(distribution: str, draw: Drawer) -> Callable[[torch.Tensor], torch.Tensor]:
    if distribution == "biased":
        return lambda x: x + draw(1, x.shape[-1])
    if distribution == "drift":

        def drifted(x: torch.Tensor) -> torch.Tensor:
            half = x.shape[0] // 2
            x[:half] += 1.0
            x[half:] -= 1.0
            return x

        return drifted
    return lambda x: x


def in_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Make the memory of a bhsd-indexed tensor contiguous in `layout`."""
    if layout == "bhsd":
        return tensor.contiguous()
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype by the name that a `CallShape` holds."""
    known = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
    if name not in known:
        raise UsageError(f"dtype {name!r}: allowed are {', '.join(known)}")
    return known[name]
