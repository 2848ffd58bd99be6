"""Launching the prologue: which streams go together, and the blocks of a program.

Nothing here is tuned: each byte is read and written once, and a program only needs enough of them
under way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.attention.prologue.record import QkNorm, QkStream, Rope
from sage_plugin.kernels.attention.prologue.triton_kernel import (
    ChannelValues,
    TableStrides,
    TokenStrides,
    TurnedTokens,
    prologue_kernel,
)

TILE = 4096
"""Channels that a program has of Q, and of K, where a norm does not need more at once."""
WARP_CHANNELS = 1024
MOST_WARPS = 16
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def joined_pair(q: Sequence[QkStream], k: Sequence[QkStream]) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and K as `emulation.joined` gives each, in one launch a stream where the two are alike."""
    outputs = _output_of(q), _output_of(k)
    left: list[tuple[QkStream, torch.Tensor]] = []
    of_q, of_k = (list(_parts(x, out)) for x, out in zip((q, k), outputs, strict=True))
    for one, other in zip(of_q, of_k, strict=False):
        if _alike(one[0], other[0]):
            _launch((one, other))
        else:
            left += [one, other]
    common = min(len(of_q), len(of_k))
    for part in (*left, *of_q[common:], *of_k[common:]):
        _launch((part,))
    return outputs


def joined(streams: Sequence[QkStream]) -> torch.Tensor:
    """Q or K alone, as `emulation.joined` gives it."""
    out = _output_of(streams)
    for part in _parts(streams, out):
        _launch((part,))
    return out


def _output_of(streams: Sequence[QkStream]) -> torch.Tensor:
    batch, _, heads, head_dim = streams[0].source.shape
    tokens = sum(stream.source.shape[1] for stream in streams)
    source = streams[0].source
    return launch_graph.empty(source.device, source.dtype, batch, tokens, heads, head_dim)


def _parts(
    streams: Sequence[QkStream], out: torch.Tensor
) -> Sequence[tuple[QkStream, torch.Tensor]]:
    """Each stream with the place of its tokens in an output."""
    lengths = [stream.source.shape[1] for stream in streams]
    places = out.split(lengths, 1)
    return [(s.without_copies(), p) for s, p in zip(streams, places, strict=True) if p.numel()]


def _alike(one: QkStream, other: QkStream) -> bool:
    """Whether a program can have tokens of both: one geometry, one form of norm, one table."""
    a, b = one.source, other.source
    if a.shape != b.shape or a.stride() != b.stride() or a.dtype != b.dtype:
        return False
    return _form(one.norm) == _form(other.norm) and _same_rope(one.rope, other.rope)


def _form(norm: QkNorm | None) -> tuple[object, ...] | None:
    if norm is None:
        return None
    return norm.kind, norm.eps, norm.across_heads, norm.rounds_first


def _same_rope(one: Rope | None, other: Rope | None) -> bool:
    if one is None or other is None:
        return one is other
    if one is other:
        return True
    pairs = ((one.cos, other.cos), (one.sin, other.sin))
    return (one.interleaved, one.skip) == (other.interleaved, other.skip) and all(
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
        for a, b in pairs
    )


def _launch(parts: Sequence[tuple[QkStream, torch.Tensor]]) -> None:
    stream, place = parts[0]
    batch, tokens, heads, head_dim = stream.source.shape
    norm, rope = stream.norm, stream.rope
    across = norm is not None and norm.across_heads
    width = 1 << (head_dim - 1).bit_length()
    block_heads = 1 << (heads - 1).bit_length() if across else heads_at_once(heads, width)
    block_tokens = max(1, TILE // (block_heads * width))
    channels = block_tokens * block_heads * width
    turned = None if rope is None else _turned(rope, stream.source)
    programs = batch * -(-tokens // block_tokens) * -(-heads // block_heads)
    launch_graph.launch(
        prologue_kernel,
        programs,
        tuple(part.source for part, _ in parts),
        tuple(out for _, out in parts),
        tuple(
            ChannelValues(*((n.weight, n.bias) if n is not None else (None, None)))
            for n in (part.norm for part, _ in parts)
        ),
        turned,
        TokenStrides(*stream.source.stride()[:3]),
        TokenStrides(*place.stride()[:3]),
        tokens,
        heads,
        1.0 if norm is None else norm.eps,
        NORM=0 if norm is None else 1 if norm.kind == "layer" else 2,
        ACROSS=across,
        ROUNDS=norm is not None and norm.rounds_first,
        INTERLEAVED=rope is None or rope.interleaved,
        TWIN=rope is None or rope.cos.shape[-1] != head_dim,
        BY_HEAD=rope is not None and rope.cos.dim() == 4 and rope.cos.shape[2] > 1,
        HEAD_DIM=head_dim,
        BLOCK_D=width,
        BLOCK_H=block_heads,
        BLOCK_S=block_tokens,
        num_warps=min(MOST_WARPS, max(1, channels // WARP_CHANNELS)),  # not tuned: bytes decide
    )


def heads_at_once(heads: int, width: int) -> int:
    """Heads of a program: a table is read once for all of them, and few lanes are idle.

    A head moves eight bytes a channel, in and out, of Q and of K, and a table has eight.

    Example:
        >>> [heads_at_once(heads, 64) for heads in (12, 24, 30, 40, 48)]
        [4, 8, 32, 8, 16]
    """
    sizes = [1 << power for power in range(7) if (1 << power) * width <= TILE]
    return min(sizes or [1], key=lambda size: -(-heads // size) * size * (1 + 1 / size))


def _turned(rope: Rope, source: torch.Tensor) -> TurnedTokens:
    """Tables as the kernel reads them, with stride 0 where they broadcast."""
    cos, sin = rope.tables()
    of_cos, of_sin = (_strides_of(table, source.shape[3], rope) for table in (cos, sin))
    return TurnedTokens(cos, sin, of_cos, of_sin, rope.skip, rope.skip + rope.rows)


def _strides_of(table: torch.Tensor, head_dim: int, rope: Rope) -> TableStrides:
    batch, token, head = (
        0 if n == 1 else s for n, s in zip(table.shape[:3], table.stride()[:3], strict=True)
    )
    last = table.stride(3)
    if table.shape[3] != head_dim:
        return TableStrides(batch, token, head, last, 0)
    if rope.interleaved:
        return TableStrides(batch, token, head, 2 * last, last)
    return TableStrides(batch, token, head, last, last * (head_dim // 2))
