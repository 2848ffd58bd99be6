"""Triton code that tells of each tile of a mask what attention has to do there.

A tile is of one of four kinds: nobody sees any of it (it is listed nowhere), 0 (every row sees
every key and nothing is added), 1 (some keys are hidden and nothing is added) or 2 (the mask adds
to scores). Each row block has a list of its tiles of each kind, in ascending order, behind the
counts of the three lists; tiles of the last two kinds have a bit for each of their rows and keys.
Causality, a window and the tail are folded in: attention compares no positions beside such a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sage_plugin.kernels.primitives import HIDES, key_bit, key_blocks, visible_keys


@triton.jit(do_not_specialize=["heads", "seq_q", "seq_k", "row_blocks", "left", "right"])
def classify_mask_kernel(
    mask, bits, lists, stride_b, stride_h, stride_q, stride_k, heads, seq_q, seq_k,
    row_blocks, left, right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, BOOL: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Lists and bits of one row block of one plane of a mask."""
    WORD: tl.constexpr = 32 if BLOCK_N > 32 else BLOCK_N
    WORDS: tl.constexpr = BLOCK_N // WORD
    block = tl.program_id(0) % row_blocks
    plane = (tl.program_id(0) // row_blocks).to(tl.int64)
    first_row = block * BLOCK_M
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    rows = first_row + m
    live = rows < seq_q
    seq_k = seq_k // UNIT * UNIT
    stride_q = stride_q // UNIT * UNIT
    mask += (plane // heads) * (stride_b // UNIT * UNIT)
    mask += (plane % heads) * (stride_h // UNIT * UNIT) + first_row.to(tl.int64) * stride_q
    at = m[:, None] * stride_q + n[None, :] * stride_k
    key_count = tl.cdiv(seq_k, BLOCK_N)
    row = plane * row_blocks + block
    lists += row * (4 + 3 * key_count)
    found = lists + 4
    words = tl.arange(0, WORDS)
    bits += row * key_count * (BLOCK_M * WORDS) + m[:, None] + words[None, :] * BLOCK_M
    whole = tl.sum(tl.full([WORD], 1, tl.int32) << key_bit(tl.arange(0, WORD)), 0)
    plain, seen, added = 0, 0, 0
    begin, _, _, end = key_blocks(
        first_row, seq_q, seq_k, left, right, BLOCK_M, BLOCK_N, LEFT, RIGHT
    )
    for j in tl.range(begin, end, num_stages=STAGES):
        keys = j * BLOCK_N + n
        tile = tl.full([], 0, tl.int64) + j
        here = live[:, None] & (keys < seq_k)[None, :]
        if BOOL:
            value = tl.load(mask + tile * BLOCK_N * stride_k + at, mask=here, other=0)
            shown = value != 0
        else:
            value = tl.load(mask + tile * BLOCK_N * stride_k + at, mask=here, other=float("-inf"))
            value = value.to(tl.float32)
            shown = (value >= HIDES) | (value != value)
        if LEFT or RIGHT:
            shown &= visible_keys(rows, keys, seq_q, seq_k, left, right, LEFT, RIGHT)
        bit = shown.to(tl.int32) << key_bit(n)[None, :]
        word = tl.sum(bit.reshape([BLOCK_M, WORDS, WORD]), 2)
        gap = (word != whole) & live[:, None]
        count = tl.sum(tl.sum((word != 0).to(tl.int32) + gap.to(tl.int32) * 65536, 1), 0)
        some = count % 65536 > 0
        mixed = some & (count >= 65536)
        is_plain = some & (count < 65536)
        if not BOOL:
            adds = tl.max(tl.max((shown & (value != 0.0)).to(tl.int32), 1), 0) > 0
            mixed = mixed & (adds == 0)
            is_plain = is_plain & (adds == 0)
            tl.store(found + 2 * key_count + added, j, mask=adds)
            added += adds.to(tl.int32)
        tl.store(bits + tile * (BLOCK_M * WORDS), word, mask=some & (is_plain == 0))
        tl.store(found + plain, j, mask=is_plain)
        tl.store(found + key_count + seen, j, mask=mixed)
        plain += is_plain.to(tl.int32)
        seen += mixed.to(tl.int32)
    tl.store(lists, plain)
    tl.store(lists + 1, seen)
    tl.store(lists + 2, added)
