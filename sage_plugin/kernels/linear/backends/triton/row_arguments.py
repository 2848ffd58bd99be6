"""What the quantizer of rows gets: records of pointers and of what it is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class RowConfig:
    """What the quantizer is compiled for.

    Attributes:
        ROWS: rows of a program.
        BLOCK_K: channels of a tile, a power of two; REST those of a second one, 0 for none.
        CHUNKED: whether a row is more than one tile, which are read twice.
        PROLOGUE: what comes before, a name of `prologue.PROLOGUES`.
        WEIGHT, BIAS, FACTOR, SHIFT: which of its tensors there are.
        KEEP: whether the rows are stored in 16 bits too.
        SMOOTH: whether channels are divided by factors.
        TURNS: passes of the rotation, log2 of its block.
        INT8: whether values become INT8; QMAX is the largest number of their type.
        TINY: smallest magnitude of a row.
        ASYMMETRIC: whether rows have offsets and sums.
        STAGE: 0 for a scale a row; with one for all, 1 finds it and 2 quantizes by it.
        COPIES: places that each row goes to, 0 for its own.
    """

    ROWS: int
    BLOCK_K: int
    REST: int
    CHUNKED: bool
    PROLOGUE: str
    WEIGHT: bool
    BIAS: bool
    FACTOR: bool
    SHIFT: bool
    KEEP: bool
    SMOOTH: bool
    TURNS: int
    INT8: bool
    QMAX: float
    TINY: float
    ASYMMETRIC: bool
    STAGE: int
    COPIES: int


class RowTensors(NamedTuple):
    """What a launch points to.

    `numbers` are scales, then offsets and sums of asymmetric rows, each `PADDED` numbers apart;
    `largest` is the bits of the largest magnitude of all rows; `copies` the places that rows go to.
    """

    x: Any
    gate: Any
    weight: Any
    bias: Any
    factor: Any
    shift: Any
    smooth: Any
    data: Any
    numbers: Any
    largest: Any
    kept: Any
    copies: Any


class PlaneStrides(NamedTuple):
    """Strides of rows that lie in planes."""

    plane: Any
    row: Any
    channel: Any


class RowStrides(NamedTuple):
    """Strides of what is read."""

    x: Any
    gate: Any
    factor: Any
    shift: Any


class RowPlace(NamedTuple):
    """Where the rows of a program are, in a kernel."""

    plane: Any
    row: Any
    m64: Any
    inside: Any
