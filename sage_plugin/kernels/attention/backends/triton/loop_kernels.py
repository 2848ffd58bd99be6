"""What the portable attention kernels share: their arguments, loop over key blocks and stores.

A kernel brings its `STEP`, which folds one key block into the running maximum `m_i`, sum `l_i` and
output `acc` of its rows. Records of values and pointers are named tuples, whose fields are
arguments of the launch, and the frozen record `CONFIG` is one constant. No field may be called
`values` or `type`, which Triton's own tuples have. Triton specializes every integer in a tuple:
those that it must not are arguments of their own, and come together in a kernel only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from sage_plugin.kernels.primitives import (
    LN2,
    LOWEST,
    head_group,
    key_blocks,
    program_block,
    sequence,
)


@dataclass(frozen=True)
class LoopConfig:
    """What an attention kernel is compiled for.

    Attributes:
        HEAD_DIM: channels of a head; BLOCK_D is the same padded to a power of two.
        BLOCK_M: rows of a program; BLOCK_N keys of a step.
        STAGES: key blocks that are loaded ahead.
        FLUSH: 1 to add P V up outside of the tensor core.
        MASK: how the mask comes (`mask_blocks`); UNIT divides its lengths and strides.
        GROUP: heads side by side that share a mask.
        LEFT: whether a window ends before a row; RIGHT after it.
        SOFTCAP, SINKS, PACKED, LSE: whether a call has them.
    """

    HEAD_DIM: int
    BLOCK_D: int
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    FLUSH: int
    MASK: int
    UNIT: int
    GROUP: int
    LEFT: bool
    RIGHT: bool
    SOFTCAP: bool
    SINKS: bool
    PACKED: bool
    LSE: bool


class CallSizes(NamedTuple):
    """Numbers of a call, in a kernel; `ratio` query heads share a key head."""

    heads_q: Any
    ratio: Any
    seq_q: Any
    seq_k: Any


class MaskTensors(NamedTuple):
    """Where a mask begins, and its bits and tiles by kind: see `mask_kernel`."""

    at: Any
    bits: Any
    lists: Any


class MaskPlane(NamedTuple):
    """The part of a mask that one program reads, in a kernel."""

    at: Any
    bits: Any
    lists: Any
    stride_m: Any
    stride_n: Any


class QueryBlock(NamedTuple):
    """Where the rows of one program lie, in a kernel: sequence, head and first row."""

    b: Any
    h: Any
    bh: Any
    block: Any
    row_blocks: Any
    first_row: Any
    q_first: Any
    k_first: Any
    seq_q: Any
    seq_k: Any


@triton.jit
def block_and_head(row_blocks, CONFIG: tl.constexpr):
    """Row block of this program, and its head among those of all batch items."""
    pid = tl.program_id(0)
    if CONFIG.MASK == 2:
        block, bh = head_group(pid, row_blocks, CONFIG.RIGHT, CONFIG.GROUP)
    else:
        block, bh = program_block(pid, row_blocks, CONFIG.RIGHT)
    return block, bh


@triton.jit
def query_block(b, h, bh, block, row_blocks, sizes, cu_seqlens, CONFIG: tl.constexpr):
    """The rows of a program, and the sequences that they belong to."""
    first_row = block * CONFIG.BLOCK_M
    q_first, seq_q = sequence(cu_seqlens.q, b, sizes.seq_q, CONFIG.PACKED)
    k_first, seq_k = sequence(cu_seqlens.k, b, sizes.seq_k, CONFIG.PACKED)
    return QueryBlock(b, h, bh, block, row_blocks, first_row, q_first, k_first, seq_q, seq_k)


@triton.jit
def lse_begin(here, lse_rows, PACKED: tl.constexpr):
    """Where the log-sum-exp of a head begins, of packed sequences that of its sequence."""
    if PACKED:
        return here.h * lse_rows + here.q_first
    return here.bh * lse_rows


@triton.jit
def plane_of(mask, strides, here, UNIT: tl.constexpr):
    """Where the plane of this program's head begins in a mask."""
    batch = strides.batch // UNIT * UNIT
    return mask + (here.b * batch + here.h * (strides.head // UNIT * UNIT))


@triton.jit
def fold_keys(head, q, mask, planes, here, window, STEP: tl.constexpr, CONFIG: tl.constexpr):
    """Online softmax over the key blocks that a block of rows sees: `m_i`, `l_i`, `acc`."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    STAGES: tl.constexpr = CONFIG.STAGES
    m_i = tl.full([BLOCK_M], LOWEST, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if CONFIG.MASK == 2:
        # The lists name the tiles of each kind; tiles that nobody sees are in none.
        key_count = tl.cdiv(here.seq_k, BLOCK_N)
        row = (here.b * planes[0] + here.h * planes[1]) * here.row_blocks + here.block
        counts = mask.lists + row * (4 + 3 * key_count)
        bits = mask.bits
        bits += row * key_count * (BLOCK_M * BLOCK_N // (32 if BLOCK_N > 32 else BLOCK_N))
        tiles = MaskPlane(mask.at, bits, mask.lists, mask.stride_m, mask.stride_n)
        for kind in tl.static_range(2 if mask.at is None else 3):
            at = counts + 4 + kind * key_count
            j = tl.load(at)
            for i in tl.range(0, tl.load(counts + kind), num_stages=STAGES):
                m_i, l_i, acc = STEP(
                    head, q, tiles, here, window, j, m_i, l_i, acc, CONFIG, False, kind
                )
                j = tl.load(at + i + 1)
    else:
        begin, inner, outer, end = key_blocks(
            here.first_row, here.seq_q, here.seq_k, window.left, window.right, BLOCK_M, BLOCK_N,
            CONFIG.LEFT, CONFIG.RIGHT,
        )  # fmt: skip
        # The edge of a window, blocks that all rows see, then the diagonal and the tail.
        if CONFIG.LEFT:
            for j in tl.range(begin, inner, num_stages=1):
                m_i, l_i, acc = STEP(head, q, mask, here, window, j, m_i, l_i, acc, CONFIG, True, 0)
        for j in tl.range(inner, outer, num_stages=STAGES):
            m_i, l_i, acc = STEP(head, q, mask, here, window, j, m_i, l_i, acc, CONFIG, False, 0)
        for j in tl.range(outer, end, num_stages=1):
            m_i, l_i, acc = STEP(head, q, mask, here, window, j, m_i, l_i, acc, CONFIG, True, 0)
    return m_i, l_i, acc


@triton.jit
def store_lse(lse, value, alive, offs_m, seq_q, SINKS: tl.constexpr):
    """Store the log-sum-exp of the rows, which comes in log2 units."""
    value = value * LN2
    if not SINKS:
        value = tl.where(alive, value, float("-inf"))
    tl.store(lse + offs_m, value, mask=offs_m < seq_q)
