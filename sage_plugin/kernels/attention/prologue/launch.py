"""Launching the prologue: which streams go together, and the blocks of a program.

Nothing here is tuned: each byte is read and written once, and a program only needs enough of them
under way.
"""

from __future__ import annotations

import itertools
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
from sage_plugin.kernels.launch_config import Memo
from sage_plugin.kernels.launch_graph import Outputs

TILE = 2048
"""Channels that a program has of Q, and of K, where a norm does not need more at once."""
WARP_CHANNELS = 1024
MOST_WARPS = 16


def joined_pair(q: Sequence[QkStream], k: Sequence[QkStream]) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and K as `emulation.joined` gives each, in one launch a stream where the two are alike."""
    out, other = _repeated(q, k)
    assert other is not None, "there is one for K"
    return out, other


def joined(streams: Sequence[QkStream]) -> torch.Tensor:
    """Q or K alone, as `emulation.joined` gives it."""
    return _repeated(streams, ())[0]


MOST_GRAPHS = 256
"""A model has a few forms, and some more with each size of its images."""
FIRST, NEVER = object(), object()
"""Known of a form: it was launched once; its launches cannot be repeated."""
_graphs: Memo[object] = Memo(MOST_GRAPHS)


def _repeated(q: Sequence[QkStream], k: Sequence[QkStream]) -> Outputs:
    """Launch: the first time of a form as it is, the second recorded, then from its launch graph.

    A build may follow from how far an address is aligned, so that this is part of a form.
    """
    inputs, shared = _inputs_of(q, k)
    addresses = [x.data_ptr() for x in inputs]
    if launch_graph.has_launch_hooks() or len(set(addresses)) < len(addresses):
        return _launched(q, k)
    residues = tuple(address % launch_graph.POINTER_ALIGNMENT for address in addresses)
    forms = tuple(stream.form() for stream in (*q, *k))
    key = (inputs[0].device, len(q), forms, shared, residues)
    known = _graphs.get(key)
    if isinstance(known, launch_graph.LaunchGraph):
        return known.replay(addresses)
    if known is not FIRST:
        _graphs.keep(key, FIRST if known is None else NEVER)
        return _launched(q, k)
    with launch_graph.recording() as recorder:
        outputs = _launched(q, k)
    _graphs.keep(key, launch_graph.graph_of(recorder, inputs, outputs) or NEVER)
    return outputs


def _inputs_of(
    q: Sequence[QkStream], k: Sequence[QkStream]
) -> tuple[list[torch.Tensor], tuple[bool, ...]]:
    """All tensors that launches read, and which streams of K have the tables of Q's."""
    shared = tuple(_same_rope(a.rope, b.rope) for a, b in zip(q, k, strict=False))
    inputs = [x for stream in q for x in stream.tensors()]
    for stream, same in itertools.zip_longest(k, shared):
        of_stream = [*stream.tensors()]
        inputs += of_stream[:-2] if same and stream.rope is not None else of_stream
    return inputs, shared


def _launched(q: Sequence[QkStream], k: Sequence[QkStream]) -> Outputs:
    out, other = _output_of(q), _output_of(k) if k else None
    of_q = list(_parts(q, out))
    of_k = [] if other is None else list(_parts(k, other))
    left: list[tuple[QkStream, torch.Tensor]] = []
    for one, two in zip(of_q, of_k, strict=False):
        if _alike(one[0], two[0]):
            _launch((one, two))
        else:
            left += [one, two]
    common = min(len(of_q), len(of_k))
    for part in (*left, *of_q[common:], *of_k[common:]):
        _launch((part,))
    return out, other


def _output_of(streams: Sequence[QkStream]) -> torch.Tensor:
    source = streams[0].source
    batch, _, heads, head_dim = source.shape
    tokens = sum(stream.source.shape[1] for stream in streams)
    return torch.empty((batch, tokens, heads, head_dim), dtype=source.dtype, device=source.device)


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
    if one is other:
        return True
    if one is None or other is None:
        return False
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
