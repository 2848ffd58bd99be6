"""What the Hopper kernels are compiled for: one record, given to them as a single constant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionConfig:
    """Constants of the attention kernel; the upper-case names are those of its code.

    Attributes:
        HEAD_DIM: channels of a head.
        PADDED_DIM: channels of its operands.
        BLOCK_N: keys of a block.
        GROUPS: warpgroups that multiply, 64 rows of queries each.
        STAGES: of the rings of K and V.
        QK8: whether Q and K are INT8, else FP8.
        PV8: whether weights and V are FP8, else fp16.
        LINEAR: groups of 16 keys of a block whose exponentials go by the linear rule.
        FLUSH: blocks between two flushes of the accumulator; 0 for none.
        EARLY: whether a step starts the scores of the next block.
        DELAYED: whether the product with V of a block is a step late.
        TERM: whether keys add something to scores.
        CAUSAL: whether queries see no later keys.
        LSE: whether the logarithm of the sums is stored.
        SHIFT: whether K was smoothed.
        SPLIT: whether the last tiles are split by key blocks.
        REGISTERS: of a thread that multiplies.
    """

    HEAD_DIM: int
    PADDED_DIM: int
    BLOCK_N: int
    GROUPS: int
    STAGES: int
    QK8: bool
    PV8: bool
    LINEAR: int
    FLUSH: int
    EARLY: int
    DELAYED: int
    TERM: bool
    CAUSAL: bool
    LSE: bool
    SHIFT: bool
    SPLIT: bool
    REGISTERS: int

    @property
    def FROM_BITS(self) -> bool:
        """Whether INT8 products count up from the bits of a float."""
        return self.QK8 and self.PV8

    @property
    def POSITIVE(self) -> bool:
        """Whether maxima start at zero: smoothed scores of rows that see every key sum to it."""
        return not self.QK8 and self.SHIFT and not self.TERM and not self.CAUSAL


@dataclass(frozen=True)
class CombineConfig:
    """Constants of the kernel that combines pieces of split tiles.

    Attributes:
        HEAD_DIM: channels of a head.
        PADDED_DIM: channels of a piece.
        BLOCK_M: rows of a tile.
        ROWS: rows of a program.
        LSE: whether the logarithm of the sums is stored.
        SHIFT: whether K was smoothed.
    """

    HEAD_DIM: int
    PADDED_DIM: int
    BLOCK_M: int
    ROWS: int
    LSE: bool
    SHIFT: bool
