"""Which batch items and heads of a large call are saved, so that a capture fits its byte budget."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sage_plugin.capture.call import CanonicalCall, autocast_dtype
from sage_plugin.errors import UsageError

KEY_BIAS_BYTES = 4
MAX_DIGITS = 6
MAX_INDEX = 10**MAX_DIGITS - 1
_LIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*,?")


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a call that is saved.

    Attributes:
        batch: batch items.
        heads: key heads; their query heads go with them.
    """

    batch: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartRule:
    """How to choose the part.

    Attributes:
        cap_bytes: limit of one capture's tensors.
        heads: number of key heads, indices of key heads, or `None` for as many as fit.
        batch: indices of batch items, or `None` for as many as fit.
    """

    cap_bytes: int
    heads: int | tuple[int, ...] | None = None
    batch: tuple[int, ...] | None = None

    def choose(self, call: CanonicalCall) -> Part | str:
        """The part of this call to save, or the reason why none can be.

        All batch items and heads if they fit; else fewer heads, evenly spread; else one batch item.
        """
        shape = call.shape
        batch = tuple(b for b in self.batch or range(shape.batch) if b < shape.batch)
        if isinstance(self.heads, tuple):
            heads = tuple(h for h in self.heads if h < shape.heads_k)
        else:
            heads = _spread(min(self.heads or shape.heads_k, shape.heads_k), shape.heads_k)
        if not batch or not heads:
            return "selected heads or batch items do not exist in the call"
        part = Part(batch, heads)
        if self.heads is None:
            room = self.cap_bytes // part_bytes(call, Part(batch, heads[:1]))
            if room == 0 and self.batch is None:
                part = Part(batch[:1], heads)
                room = self.cap_bytes // part_bytes(call, Part(batch[:1], heads[:1]))
            part = Part(part.batch, _spread(min(room, shape.heads_k), shape.heads_k))
        elif self.batch is None and part_bytes(call, part) > self.cap_bytes:
            part = Part(batch[:1], heads)
        if not part.heads or part_bytes(call, part) > self.cap_bytes:
            return f"larger than the {self.cap_bytes} bytes that the budget leaves for one capture"
        return part


def part_bytes(call: CanonicalCall, part: Part) -> int:
    """Bytes of the tensors of a part, as they are written."""
    items, heads = len(part.batch), len(part.heads)
    total = 0
    for tensor, ratio in ((call.q, call.group), (call.k, 1), (call.v, 1)):
        element = (autocast_dtype(tensor) or tensor.dtype).itemsize
        total += items * heads * ratio * tensor.shape[2] * tensor.shape[3] * element
    if call.mask is not None:
        b, h, rows, keys = call.mask.shape
        element = KEY_BIAS_BYTES if rows == 1 else call.mask.element_size()
        total += (
            (items if b > 1 else 1) * (heads * call.group if h > 1 else 1) * rows * keys * element
        )
    return total


def checked_heads(heads: int | str | Iterable[int] | None) -> int | tuple[int, ...] | None:
    """The `heads` of `PartRule` from a caller's value.

    Args:
        heads: a number of heads (`4`, `"4"`), indices (`[0, 5]`, `"0,5,8-11"`, `"3,"`), or `None`.

    Raises:
        UsageError: anything else, fewer than one head, or a negative index.
    """
    if isinstance(heads, str) and heads.strip().isdecimal() and len(heads.strip()) <= MAX_DIGITS:
        heads = int(heads)
    if isinstance(heads, int):
        if heads < 1:
            raise UsageError(f"heads: got {heads}, expected at least 1, indices, or None")
        return heads
    return None if heads is None else _indices(heads, "heads")


def checked_batch(batch: int | str | Iterable[int]) -> tuple[int, ...]:
    """The `batch` of `PartRule` from a caller's value.

    Raises:
        UsageError: no list of indices from 0 on.
    """
    if isinstance(batch, int):
        raise UsageError(f"batch: got {batch}, expected indices of batch items such as [0, 1]")
    return _indices(batch, "batch")


def _indices(indices: str | Iterable[int], what: str) -> tuple[int, ...]:
    """Sorted, distinct indices from numbers or from `"0,5,8-11"`."""
    if not isinstance(indices, str):
        result = tuple(sorted(set(indices)))
        if not result or result[0] < 0:
            raise UsageError(f"{what}: got {result}, expected indices from 0 on")
        return result
    text = indices.replace(" ", "")
    if not _LIST.fullmatch(text):
        raise UsageError(f'{what}: got {indices!r}, expected indices and ranges such as "0,5,8-11"')
    if any(len(number) > MAX_DIGITS for number in re.findall(r"\d+", text)):
        raise UsageError(f"{what}: indices go up to {MAX_INDEX}")
    found: set[int] = set()
    for item in text.rstrip(",").split(","):
        low, _, high = item.partition("-")
        if int(high or low) < int(low):
            raise UsageError(f"{what}: the range {item!r} runs backwards")
        found.update(range(int(low), int(high or low) + 1))
    return tuple(sorted(found))


def _spread(count: int, size: int) -> tuple[int, ...]:
    """`count` of `size` indices, each in the middle of an equal part."""
    return tuple((2 * i + 1) * size // (2 * count) for i in range(count))
