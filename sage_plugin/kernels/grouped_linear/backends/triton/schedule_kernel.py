"""The Triton kernel that plans a grouped product on the device, and zeroes what no group has.

A block is up to `BLOCK_M` rows of one group. The first programs write a table of blocks, each of
them some; the others store zeros into the rows beyond the last group.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = 3
"""Numbers of a block: its group, its first row, and the end of its group."""


@triton.jit
def _groups(sizes, T, E, GROUPS: tl.constexpr):
    """Begin and end of each group: (GROUPS), none beyond the rows that there are."""
    offs_e = tl.arange(0, GROUPS)
    size = tl.load(sizes + offs_e, mask=offs_e < E, other=0).to(tl.int64)
    size = tl.minimum(tl.maximum(size, 0), T)
    last = tl.cumsum(size, 0)
    return tl.minimum(last - size, T).to(tl.int32), tl.minimum(last, T).to(tl.int32)


@triton.jit
def _plan(begin, end, table, capacity, program, CONFIG: tl.constexpr):
    """Write some blocks of the table, and the first program their number."""
    count = (end - begin + CONFIG.BLOCK_M - 1) // CONFIG.BLOCK_M
    last = tl.cumsum(count, 0)
    if program == 0:
        tl.store(table, tl.sum(count, 0))
    offs_b = program * CONFIG.BLOCKS + tl.arange(0, CONFIG.BLOCKS)
    # the group of each block: (BLOCKS), by the blocks of groups before it
    group = tl.sum((last[None, :] <= offs_b[:, None]).to(tl.int32), 1)
    own = tl.arange(0, CONFIG.GROUPS)[None, :] == group[:, None]  # (BLOCKS, GROUPS)
    first = tl.sum(tl.where(own, (last - count)[None, :], 0), 1)
    row = tl.sum(tl.where(own, begin[None, :], 0), 1) + (offs_b - first) * CONFIG.BLOCK_M
    stop = tl.sum(tl.where(own, end[None, :], 0), 1)
    there = offs_b < capacity
    tl.store(table + 1 + offs_b, group, mask=there)
    tl.store(table + 1 + capacity + offs_b, row, mask=there)
    tl.store(table + 1 + 2 * capacity + offs_b, stop, mask=there)


@triton.jit
def _zero(out, first, step, T, N, CONFIG: tl.constexpr):
    """Store zeros into some of the rows from the first one on."""
    ROWS: tl.constexpr = CONFIG.ZERO_ROWS
    WIDTH: tl.constexpr = CONFIG.ZERO_WIDTH
    zeros = tl.zeros([ROWS, WIDTH], out.dtype.element_ty)
    for t in range(first, T, step):
        offs_t = t + tl.arange(0, ROWS)
        for n in range(0, N, WIDTH):
            offs_n = n + tl.arange(0, WIDTH)
            to = out + offs_t.to(tl.int64)[:, None] * N + offs_n[None, :]
            tl.store(to, zeros, mask=(offs_t < T)[:, None] & (offs_n < N)[None, :])


@triton.jit(do_not_specialize=("T", "capacity", "planners", "zeroers"))  # which differ by prompt
def schedule_groups_kernel(
    sizes, table, out, T, N, E, capacity, planners, zeroers, CONFIG: tl.constexpr
):
    """Write the number of blocks and the table of them, `(FIELDS, capacity)`."""
    begin, end = _groups(sizes, T, E, CONFIG.GROUPS)
    program = tl.program_id(0)
    if program < planners:
        _plan(begin, end, table, capacity, program, CONFIG)
    else:
        first = tl.max(end, 0) + (program - planners) * CONFIG.ZERO_ROWS
        _zero(out, first, zeroers * CONFIG.ZERO_ROWS, T, N, CONFIG)
