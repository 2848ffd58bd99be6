"""The prologue in plain torch: what the kernel computes, cast by cast, and what compilers fuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sage_plugin.kernels.attention.prologue.record import QkNorm, QkStream, Rope


def joined(streams: Sequence[QkStream]) -> torch.Tensor:
    """Streams with their norms and rotary embeddings, one after another `(B, sum of S, H, D)`."""
    done = [_prepared(stream) for stream in streams]
    return done[0] if len(done) == 1 else torch.cat(done, 1)


def _prepared(stream: QkStream) -> torch.Tensor:
    x = stream.source
    if stream.norm is not None:
        x = _normalized(x, stream.norm)
    return x if stream.rope is None else _turned(x, stream.rope)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In fp32, in fp64 what is so already."""
    return x if x.dtype == torch.float64 else x.float()


def _normalized(x: torch.Tensor, norm: QkNorm) -> torch.Tensor:
    dims = (-2, -1) if norm.across_heads else (-1,)
    wide = _wide(x)
    if norm.kind == "layer":
        wide = wide - wide.mean(dims, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + norm.eps)
    shape = x.shape[-2:] if norm.across_heads else x.shape[-1:]
    if norm.rounds_first:
        wide = _wide(wide.to(x.dtype))
    if norm.weight is not None:
        wide = wide * _wide(norm.weight).view(shape)
    if norm.bias is not None:
        if norm.rounds_first:
            wide = _wide(wide.to(x.dtype))
        wide = wide + _wide(norm.bias).view(shape)
    return wide.to(x.dtype)


def _turned(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    rows, skip = rope.rows, rope.skip
    if rows == x.shape[1]:
        return _turned_all(x, rope)
    turned = _turned_all(x[:, skip : skip + rows], rope)
    return torch.cat((x[:, :skip], turned, x[:, skip + rows :]), 1)


def _turned_all(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    split = (-1, 2) if rope.interleaved else (2, -1)
    at = -1 if rope.interleaved else -2
    first, second = _wide(x).unflatten(-1, split).unbind(at)
    (cos, other_cos), (sin, other_sin) = (
        _of_pairs(_wide(table), x.shape[-1], split, at) for table in rope.tables()
    )
    turned = (first * cos - second * sin, second * other_cos + first * other_sin)
    return torch.stack(turned, at).flatten(-2).to(x.dtype)


def _of_pairs(
    table: torch.Tensor, head_dim: int, split: tuple[int, int], at: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of both channels of each pair."""
    if table.shape[-1] != head_dim:
        return table, table
    first, second = table.unflatten(-1, split).unbind(at)
    return first, second
