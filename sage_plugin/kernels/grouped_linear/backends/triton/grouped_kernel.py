"""The Triton kernel that multiplies rows with the weight of their group.

Grid: a few programs a multiprocessor, each of which takes tiles of the output in turn; which rows
and which weight a tile has, it reads from the table of `schedule_kernel`. INT8 products are summed
in int32, others in fp32; the epilogue is that of linears.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sage_plugin.kernels.linear.backends.triton.product_kernel import (
    OutputTile,
    finished_tile,
    place_of_tile,
)


class GroupedTensors(NamedTuple):
    """What a launch points to beside the operands.

    The names of linears' `ProductTensors`, less offsets, which grouped weights have none of.
    """

    out: Any
    x_scale: Any
    w_scale: Any
    bias: Any
    table: Any


@triton.jit(do_not_specialize=("T", "capacity", "programs"))  # which differ by prompt
def grouped_product_kernel(x, w, tensors, T, N, K, capacity, programs, CONFIG: tl.constexpr):
    """`x @ w[group].T`; x `(T, K)` and w `(E * N, K)` are contiguous, or described."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    BLOCK_K: tl.constexpr = CONFIG.BLOCK_K
    SUM: tl.constexpr = tl.int32 if CONFIG.INT8 else tl.float32
    table = tensors.table
    tiles_m = tl.load(table)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, programs, flatten=CONFIG.FLATTEN):
        block_m, block_n = place_of_tile(tile, tiles_m, tiles_n, CONFIG.GROUP_M)
        group = tl.load(table + 1 + block_m)
        row = tl.load(table + 1 + capacity + block_m)
        stop = tl.load(table + 1 + 2 * capacity + block_m)
        offs_m = row + tl.arange(0, BLOCK_M)
        offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        inside_m, inside_n = offs_m < stop, offs_n < N
        acc = tl.zeros([BLOCK_M, BLOCK_N], SUM)
        if CONFIG.TMA:
            # Rows of the next group or weight are read where this one ends, and not stored.
            for k in range(0, K, BLOCK_K):
                x_tile = x.load([row, k])  # (BLOCK_M, BLOCK_K)
                w_tile = w.load([group * N + block_n * BLOCK_N, k])  # (BLOCK_N, BLOCK_K)
                acc = tl.dot(x_tile, w_tile.T, acc, out_dtype=SUM)
        else:
            offs_k = tl.arange(0, BLOCK_K)
            # Rows past the end are read again from the last: their sums are not stored.
            m64 = tl.minimum(offs_m, stop - 1).to(tl.int64)
            n64 = group.to(tl.int64) * N + tl.minimum(offs_n, N - 1)
            x_at = x + m64[:, None] * K + offs_k[None, :]
            w_at = w + n64[:, None] * K + offs_k[None, :]
            for k in range(0, K, BLOCK_K):
                if CONFIG.EVEN_K:
                    x_tile = tl.load(x_at + k)  # (BLOCK_M, BLOCK_K)
                    w_tile = tl.load(w_at + k)  # (BLOCK_N, BLOCK_K)
                else:
                    there = (k + offs_k < K)[None, :]
                    x_tile = tl.load(x_at + k, mask=there, other=0.0)
                    w_tile = tl.load(w_at + k, mask=there, other=0.0)
                acc = tl.dot(x_tile, w_tile.T, acc, out_dtype=SUM)
        at = OutputTile(offs_m, group * N + offs_n, inside_m, inside_n)
        out = finished_tile(acc, tensors, at, K, CONFIG)
        to = tensors.out + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
        mask = inside_m[:, None] & inside_n[None, :]
        tl.store(to, out.to(tensors.out.dtype.element_ty), mask=mask)
