"""Launching the prologue: which streams go together, where they go, and the blocks of a program.

Nothing here is tuned: each byte is read and written once, and a program only needs enough of them
under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.attention.prologue.arguments import (
    ChannelValues,
    PrologueConfig,
    QuantizedTokens,
    TableStrides,
    TokenStrides,
    TurnedTokens,
)
from sage_plugin.kernels.attention.prologue.pair import QkPair, same_rope
from sage_plugin.kernels.attention.prologue.record import QkNorm, QkStream, Rope
from sage_plugin.kernels.attention.prologue.triton_kernel import prologue_kernel
from sage_plugin.kernels.launch_config import Memo
from sage_plugin.kernels.launch_graph import Outputs
from sage_plugin.kernels.quantize.recipe import LOG2E, TINY

TILE = 2048
"""Channels that a program has of Q, and of K, where a norm does not need more at once."""
WARP_CHANNELS = 1024
MOST_WARPS = 16


@dataclass(frozen=True, slots=True)
class QueryRows:
    """Where Q goes that is quantized by rows.

    Attributes:
        values: `(B, H, rows, padded channels)`; rows past the tokens become zeros.
        scale: `(B, H, rows)`.
        factor: softmax scale.
        largest: the largest number of the type of values.
    """

    values: torch.Tensor
    scale: torch.Tensor
    factor: float
    largest: float

    def part(self, begin: int, end: int) -> QueryRows:
        """Some of the rows."""
        values, scale = (x[:, :, begin:end] for x in (self.values, self.scale))
        return QueryRows(values, scale, self.factor, self.largest)

    def arguments(self) -> QuantizedTokens:
        """What the kernel gets."""
        (batch, head, token), values = self.values.stride()[:3], self.values
        strides = TokenStrides(batch, token, head)
        batch, head, token = self.scale.stride()
        return QuantizedTokens(
            values, self.scale, strides, TokenStrides(batch, token, head), values.shape[2],
            self.factor * LOG2E,
        )  # fmt: skip


def joined_pair(q: Sequence[QkStream], k: Sequence[QkStream]) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and K as `emulation.joined` gives each, in one launch a stream where the two are alike."""
    out, other = _repeated(q, k)
    assert other is not None, "there is one for K"
    return out, other


def joined(streams: Sequence[QkStream]) -> torch.Tensor:
    """Q or K alone, as `emulation.joined` gives it."""
    return _repeated(streams, ())[0]


def quantized_pair(pair: QkPair, rows: QueryRows) -> torch.Tensor:
    """K as `joined_pair` gives it, while Q is quantized into rows; launched as scratch is."""
    source = pair.k[0].source
    batch, _, heads, head_dim = source.shape
    tokens = sum(stream.source.shape[1] for stream in pair.k)
    k = launch_graph.empty(source.device, source.dtype, batch, tokens, heads, head_dim)
    ends, filled = 0, [stream for stream in pair.q if stream.source.shape[1]]
    of_q: list[Part] = []
    for stream in filled:
        begin, ends = ends, ends + stream.source.shape[1]
        end = rows.values.shape[2] if stream is filled[-1] else ends
        of_q.append((stream.without_copies(), rows.part(begin, end)))
    _launch_all(of_q, _parts(pair.k, k))
    return k


MOST_GRAPHS = 256
"""A model has a few forms, and some more with each size of its images."""
FIRST, NEVER = object(), object()
"""Known of a form: it was launched once; its launches cannot be repeated."""
_graphs: Memo[object] = Memo(MOST_GRAPHS)


def _repeated(q: Sequence[QkStream], k: Sequence[QkStream]) -> Outputs:
    """Launch: the first time of a form as it is, the second recorded, then from its launch graph.

    A build may follow from how far an address is aligned, so that this is part of a form.
    """
    pair = QkPair(tuple(q), tuple(k))
    inputs = pair.inputs()
    addresses = [x.data_ptr() for x in inputs]
    if launch_graph.has_launch_hooks() or len(set(addresses)) < len(addresses):
        return _launched(q, k)
    key = (inputs[0].device, pair.form())
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


def _launched(q: Sequence[QkStream], k: Sequence[QkStream]) -> Outputs:
    out, other = _output_of(q), _output_of(k) if k else None
    _launch_all(_parts(q, out), [] if other is None else _parts(k, other))
    return out, other


def _launch_all(of_q: Sequence[Part], of_k: Sequence[Part]) -> None:
    """Launch all streams, those of Q and K together that are alike."""
    left: list[Part] = []
    for one, two in zip(of_q, of_k, strict=False):
        if _alike(one[0], two[0]):
            _launch((one, two))
        else:
            left += [one, two]
    common = min(len(of_q), len(of_k))
    for part in (*left, *of_q[common:], *of_k[common:]):
        _launch((part,))


def _output_of(streams: Sequence[QkStream]) -> torch.Tensor:
    source = streams[0].source
    batch, _, heads, head_dim = source.shape
    tokens = sum(stream.source.shape[1] for stream in streams)
    return torch.empty((batch, tokens, heads, head_dim), dtype=source.dtype, device=source.device)


Part = tuple[QkStream, torch.Tensor | QueryRows]
"""A stream, and where its tokens go."""


def _parts(streams: Sequence[QkStream], out: torch.Tensor) -> list[Part]:
    """Each stream with the place of its tokens in an output."""
    lengths = [stream.source.shape[1] for stream in streams]
    places = out.split(lengths, 1)
    return [(s.without_copies(), p) for s, p in zip(streams, places, strict=True) if p.numel()]


def _alike(one: QkStream, other: QkStream) -> bool:
    """Whether a program can have tokens of both: one geometry, one form of norm, one table."""
    a, b = one.source, other.source
    if a.shape != b.shape or a.stride() != b.stride() or a.dtype != b.dtype:
        return False
    return _form(one.norm) == _form(other.norm) and same_rope(one.rope, other.rope)


def _form(norm: QkNorm | None) -> tuple[object, ...] | None:
    if norm is None:
        return None
    return norm.kind, norm.eps, norm.across_heads, norm.rounds_first


def _launch(parts: Sequence[Part]) -> None:
    stream = parts[0][0]
    batch, tokens, heads, head_dim = stream.source.shape
    norm, rope = stream.norm, stream.rope
    across = norm is not None and norm.across_heads
    rows = next((place for _, place in parts if isinstance(place, QueryRows)), None)
    outputs = tuple(place for _, place in parts if isinstance(place, torch.Tensor))
    width = 1 << (head_dim - 1).bit_length() if rows is None else rows.values.shape[3]
    block_heads = 1 << (heads - 1).bit_length() if across else heads_at_once(heads, width)
    block_tokens = max(1, TILE // (block_heads * width))
    channels = block_tokens * block_heads * width
    turned = None if rope is None else _turned(rope, stream.source)
    written = tokens if rows is None else rows.values.shape[2]
    config = PrologueConfig(
        NORM=0 if norm is None else 1 if norm.kind == "layer" else 2, ACROSS=across,
        ROUNDS=norm is not None and norm.rounds_first, INTERLEAVED=rope is None or rope.interleaved,
        TWIN=rope is None or rope.cos.shape[-1] != head_dim,
        BY_HEAD=rope is not None and rope.cos.dim() == 4 and rope.cos.shape[2] > 1,
        HEAD_DIM=head_dim, BLOCK_D=width, BLOCK_H=block_heads, BLOCK_S=block_tokens,
        QMAX=0.0 if rows is None else rows.largest, TINY=TINY,
    )  # fmt: skip
    launch_graph.launch(
        prologue_kernel, batch * -(-written // block_tokens) * -(-heads // block_heads),
        tuple(part.source for part, _ in parts), outputs or None,
        None if rows is None else rows.arguments(),
        tuple(
            ChannelValues(*((n.weight, n.bias) if n is not None else (None, None)))
            for n in (part.norm for part, _ in parts)
        ),
        turned, TokenStrides(*stream.source.stride()[:3]),
        TokenStrides(*outputs[0].stride()[:3]) if outputs else None, tokens, heads,
        1.0 if norm is None else norm.eps, CONFIG=config,
        num_warps=min(MOST_WARPS, max(1, channels // WARP_CHANNELS)),  # not tuned: bytes decide
        enable_fp_fusion=rows is None,  # numbers are rounded as the pre-pass does
    )  # fmt: skip


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
