"""What a tensor that was put off will be: tokens of sources, with their norms and embeddings.

The functions say what one operation makes of it, and answer `None` to what they do not know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sage_plugin.kernels.attention.prologue.record import QkNorm, QkStream, Rope


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Tokens of one tensor.

    Attributes:
        source: the tensor before its norm, `(B, S, C)` or of four dimensions, in today's order.
        start: its first token that is meant.
        stop: the token after the last.
        norm: what follows, if anything.
        rope: then, if anything; its tokens count from `start`. Of a source of three dimensions the
            tables have all channels, or a dimension of heads.
    """

    source: torch.Tensor
    start: int
    stop: int
    norm: QkNorm | None = None
    rope: Rope | None = None

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.stop - self.start

    def cut(self, begin: int, end: int) -> Piece:
        """Some of its tokens, counted from its own first."""
        rope = None if self.rope is None else cut_rope(self.rope, begin, end)
        return Piece(self.source, self.start + begin, self.start + end, self.norm, rope)


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A tensor that was put off.

    Attributes:
        shape: its shape.
        pieces: what lies one after another along the tokens.
        axis: the dimension of its tokens, `None` while nothing told; there is one piece then,
            which is all of its source.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    axis: int | None = None

    @staticmethod
    def whole(source: torch.Tensor, norm: QkNorm | None = None) -> Pending:
        """All of a tensor of three or four dimensions."""
        shape = tuple(source.shape)
        axis = 1 if len(shape) == 3 else None
        return Pending(shape, (Piece(source, 0, 0 if axis is None else shape[1], norm),), axis)

    def along(self, axis: int) -> Pending | None:
        """The same with a known dimension of tokens; `None` where it is another."""
        if self.axis is not None:
            return self if self.axis == axis else None
        if axis not in (1, 2):
            return None
        whole = dataclasses.replace(self.pieces[0], stop=self.shape[axis])
        return Pending(self.shape, (whole,), axis)

    def cut(self, begin: int, end: int) -> tuple[Piece, ...]:
        """The pieces of some tokens."""
        found, offset = [], 0
        for piece in self.pieces:
            first, last = max(begin - offset, 0), min(end - offset, piece.tokens)
            if first < last:
                found.append(piece.cut(first, last))
            offset += piece.tokens
        return tuple(found)

    def with_sources(self, change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Piece, ...]:
        """The pieces of changed sources; those of one source have one again."""
        sources = {id(p.source): p.source for p in self.pieces}
        changed = {key: change(source) for key, source in sources.items()}
        return tuple(dataclasses.replace(p, source=changed[id(p.source)]) for p in self.pieces)


def cut_rope(rope: Rope, begin: int, end: int) -> Rope | None:
    """The tables of some tokens, `None` where none of them is turned."""
    first, last = max(begin, rope.skip), min(end, rope.skip + rope.rows)
    if first >= last:
        return None
    if last - first == rope.rows:
        same = rope.skip == first - begin
        return rope if same else Rope(rope.cos, rope.sin, rope.interleaved, first - begin)
    axis = 0 if rope.cos.dim() == 2 else 1
    cos, sin = (t.narrow(axis, first - rope.skip, last - first) for t in (rope.cos, rope.sin))
    return Rope(cos, sin, rope.interleaved, first - begin)


# -- operations ----------------------------------------------------------------------------------


def transposed(x: Pending, one: int, other: int) -> Pending | None:
    """Heads and tokens exchanged."""
    if len(x.shape) != 4 or {one % 4, other % 4} != {1, 2}:
        return None
    shape = (x.shape[0], x.shape[2], x.shape[1], x.shape[3])
    pieces = x.with_sources(lambda source: source.transpose(1, 2))
    return Pending(shape, pieces, None if x.axis is None else 3 - x.axis)


def permuted(x: Pending, dims: Sequence[int]) -> Pending | None:
    """Heads and tokens exchanged, by all dimensions."""
    return transposed(x, 1, 2) if tuple(dims) == (0, 2, 1, 3) else None


def unflattened(x: Pending, dim: int, sizes: Sequence[int]) -> Pending | None:
    """Channels parted into heads."""
    if len(x.shape) != 3 or dim not in (2, -1) or len(sizes) != 2:
        return None
    channels = x.shape[2]
    heads, width = (channels // max(sizes[1 - i], 1) if n == -1 else n for i, n in enumerate(sizes))
    if heads * width != channels:
        return None
    pieces = x.with_sources(lambda source: source.unflatten(2, (heads, width)))
    parted = []
    for piece in pieces:
        rope = piece.rope
        if rope is not None and rope.cos.dim() == 3:
            if rope.cos.shape[2] % heads:
                return None
            cos, sin = (t.unflatten(2, (heads, -1)) for t in (rope.cos, rope.sin))
            rope = Rope(cos, sin, rope.interleaved, rope.skip)
        parted.append(dataclasses.replace(piece, rope=rope))
    return Pending((*x.shape[:2], heads, width), tuple(parted), 1)


def viewed(x: Pending, sizes: Sequence[int]) -> Pending | None:
    """Channels parted into heads, by a view."""
    if len(x.shape) != 3 or len(sizes) != 4:
        return None
    batch, tokens, heads, width = sizes
    if batch not in (-1, x.shape[0]) or tokens not in (-1, x.shape[1]) or -1 in (heads, width):
        return None
    return unflattened(x, 2, (heads, width)) if heads * width == x.shape[2] else None


def span_of(x: Pending, index: object) -> tuple[Pending, int, int] | None:
    """The tokens that an index means, the first and the one after the last."""
    parts = list(index) if isinstance(index, tuple) else [index]
    while len(parts) > 1 and parts[-1] == slice(None):
        parts.pop()
    axis = len(parts) - 1
    *whole, tokens = parts
    if not isinstance(tokens, slice) or any(part != slice(None) for part in whole):
        return None
    along = x.along(axis)
    if along is None or tokens.step not in (None, 1):
        return None
    begin, end = (_bound(at, x.shape[axis]) for at in (tokens.start or 0, tokens.stop))
    return None if begin >= end else (along, begin, end)


def _bound(at: int | None, size: int) -> int:
    """Where a slice begins or ends; a compiler traces this, and has no `slice.indices`."""
    if at is None:
        return size
    return max(at + size, 0) if at < 0 else min(at, size)


def sliced(x: Pending, index: object) -> Pending | None:
    """Some of the tokens."""
    found = span_of(x, index)
    if found is None:
        return None
    along, begin, end = found
    assert along.axis is not None, "an index tells the dimension"
    return Pending(_resized(along, end - begin), along.cut(begin, end), along.axis)


def replaced(x: Pending, index: object, value: Pending) -> Pending | None:
    """Other tokens in the place of some."""
    found = span_of(x, index)
    if found is None:
        return None
    along, begin, end = found
    assert along.axis is not None, "an index tells the dimension"
    new = value.along(along.axis)
    if new is None or new.shape != _resized(along, end - begin):
        return None
    pieces = along.cut(0, begin) + new.pieces + along.cut(end, x.shape[along.axis])
    return Pending(x.shape, pieces, along.axis)


def concatenated(parts: Sequence[Pending], dim: int) -> Pending | None:
    """Tokens one after another."""
    axis = dim % len(parts[0].shape)
    known = [along for part in parts if (along := part.along(axis)) is not None]
    if len(known) < len(parts):
        return None
    total = sum(part.shape[axis] for part in known)
    shape = _resized(known[0], total)
    if any(_resized(part, total) != shape for part in known):
        return None
    return Pending(shape, tuple(p for part in known for p in part.pieces), axis)


def turned(x: Pending, rope: Rope, axis: int) -> Pending | None:
    """All tokens turned, by tables of as many rows."""
    along = x.along(axis)
    if along is None or rope.rows != x.shape[axis] or any(p.rope is not None for p in along.pieces):
        return None
    pieces, offset = [], 0
    for piece in along.pieces:
        own = cut_rope(rope, offset, offset + piece.tokens)
        pieces.append(dataclasses.replace(piece, rope=own))
        offset += piece.tokens
    return Pending(x.shape, tuple(pieces), axis)


def _resized(x: Pending, tokens: int) -> tuple[int, ...]:
    return tuple(tokens if i == x.axis else n for i, n in enumerate(x.shape))


# -- for the kernel ------------------------------------------------------------------------------


def streams_of(x: Pending, layout: str) -> list[QkStream] | None:
    """Its streams as the kernel takes them; `None` where it is not what attention takes."""
    axis = 2 if layout == "bhsd" else 1
    along = x.along(axis) if len(x.shape) == 4 else None
    if along is None:
        return None
    streams = []
    for piece in _merged(along.pieces):
        source = piece.source.transpose(1, 2) if axis == 2 else piece.source
        if piece.tokens < source.shape[1]:
            source = source.narrow(1, piece.start, piece.tokens)
        if source.dtype != x.pieces[0].source.dtype:
            return None
        streams.append(QkStream(source, piece.norm, piece.rope))
    return streams


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces that follow each other in one source as one, where at most one of them is turned."""
    merged = [pieces[0]]
    for piece in pieces[1:]:
        last = merged[-1]
        one_source = last.source is piece.source and last.norm is piece.norm
        if not one_source or last.stop != piece.start or (last.rope and piece.rope):
            merged.append(piece)
            continue
        rope = last.rope
        if piece.rope is not None:
            rope = dataclasses.replace(piece.rope, skip=piece.rope.skip + last.tokens)
        merged[-1] = Piece(last.source, last.start, piece.stop, last.norm, rope)
    return merged
