"""What the prologue's kernel gets: records of values and pointers, and what it is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class PrologueConfig:
    """What the prologue is compiled for.

    Attributes:
        NORM: 0 for none, 1 for LayerNorm and 2 for RMSNorm.
        ACROSS: one mean for all heads of a token.
        ROUNDS: round before the weight, and again before the bias.
        INTERLEAVED: pairs are neighbors; else the halves of a head.
        TWIN: both channels of a pair have one angle.
        BY_HEAD: each head has angles of its own.
        HEAD_DIM: channels of a head; BLOCK_D is the same padded to a power of two.
        BLOCK_H: heads of a program, BLOCK_S tokens.
        QMAX: the largest number of the type that Q is quantized to; 0 where it is not.
        TINY: smallest magnitude of a quantized row.
    """

    NORM: int
    ACROSS: bool
    ROUNDS: bool
    INTERLEAVED: bool
    TWIN: bool
    BY_HEAD: bool
    HEAD_DIM: int
    BLOCK_D: int
    BLOCK_H: int
    BLOCK_S: int
    QMAX: float = 0.0
    TINY: float = 0.0


class TokenStrides(NamedTuple):
    """Strides of a tensor whose channels lie one after another."""

    batch: Any
    token: Any
    head: Any


class TableStrides(NamedTuple):
    """Strides of cosines or sines; `second` leads from the first channel of a pair to the other."""

    batch: Any
    token: Any
    head: Any
    pair: Any
    second: Any


class TurnedTokens(NamedTuple):
    """Cosines and sines in a kernel, and which tokens have them."""

    cos: Any
    sin: Any
    cos_strides: Any
    sin_strides: Any
    begin: Any
    end: Any


class ChannelValues(NamedTuple):
    """Weight and bias of a norm in a kernel, `None` where there is none."""

    weight: Any
    bias: Any


class QuantizedTokens(NamedTuple):
    """Where quantized tokens of Q go, in a kernel.

    Attributes:
        numbers: 8-bit rows of all padded channels, one scale each.
        scale: those.
        number_strides: strides of the rows.
        scale_strides: strides of the scales.
        tokens: tokens to write; those past the source's are zeros.
        multiplier: factor of each value, softmax scale and log2 e.
    """

    numbers: Any
    scale: Any
    number_strides: Any
    scale_strides: Any
    tokens: Any
    multiplier: Any
