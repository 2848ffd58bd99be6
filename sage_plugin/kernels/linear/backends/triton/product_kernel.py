"""The Triton kernel that multiplies quantized rows with a quantized weight.

Grid: a few programs a multiprocessor, each of which takes tiles of the output in turn; tiles that
run together share rows of the weight in the L2 cache. INT8 products are summed in int32, FP8 ones
in fp32. The epilogue has scales, cross terms of offsets and bias: see `product.finished`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class ProductTensors(NamedTuple):
    """What the epilogue of a launch points to."""

    out: Any
    x_scale: Any
    x_offset: Any
    x_sums: Any
    w_scale: Any
    w_offset: Any
    w_sums: Any
    bias: Any


class OutputTile(NamedTuple):
    """Rows and columns of a tile of the output, in a kernel."""

    m: Any
    n: Any
    inside_m: Any
    inside_n: Any


@triton.jit
def place_of_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Block of rows and of columns of a tile; `GROUP_M` blocks of rows go column by column."""
    width = GROUP_M * tiles_n
    first = tile // width * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    return first + tile % width % height, tile % width // height


@triton.jit
def finished_tile(acc, tensors, at, K, CONFIG: tl.constexpr):
    """A tile of the output from its sums: (BLOCK_M, BLOCK_N), in fp32."""
    if not CONFIG.SCALED:
        out = acc.to(tl.float32)
    elif CONFIG.PER_TENSOR:
        of_rows = tl.load(tensors.x_scale)
        scale = of_rows * tl.load(tensors.w_scale)
        out = acc.to(tl.float32) * scale
    else:
        of_rows = tl.load(tensors.x_scale + at.m, mask=at.inside_m, other=0.0)  # (BLOCK_M)
        of_columns = tl.load(tensors.w_scale + at.n, mask=at.inside_n, other=0.0)  # (BLOCK_N)
        out = acc.to(tl.float32) * (of_rows[:, None] * of_columns[None, :])
    if CONFIG.ASYMMETRIC:
        offset = tl.load(tensors.x_offset + at.m, mask=at.inside_m, other=0.0)
        sums = tl.load(tensors.x_sums + at.m, mask=at.inside_m, other=0.0) * of_rows
        w_offset = tl.load(tensors.w_offset + at.n, mask=at.inside_n, other=0.0)
        w_sums = tl.load(tensors.w_sums + at.n, mask=at.inside_n, other=0.0) * of_columns
        out += sums[:, None] * w_offset[None, :]
        out += offset[:, None] * (w_sums + K * w_offset)[None, :]
    if CONFIG.BIAS:
        bias = tl.load(tensors.bias + at.n, mask=at.inside_n, other=0.0).to(tl.float32)
        out += bias[None, :]
    return out


@triton.jit
def scaled_product_kernel(x, w, tensors, M, N, K, programs, CONFIG: tl.constexpr):
    """`x @ w.T` with its epilogue; x `(M, K)` and w `(N, K)` are contiguous, or described."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    BLOCK_K: tl.constexpr = CONFIG.BLOCK_K
    SUM: tl.constexpr = tl.int32 if CONFIG.INT8 else tl.float32
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, programs, flatten=CONFIG.FLATTEN):
        block_m, block_n = place_of_tile(tile, tiles_m, tiles_n, CONFIG.GROUP_M)
        offs_m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        at = OutputTile(offs_m, offs_n, offs_m < M, offs_n < N)
        acc = tl.zeros([BLOCK_M, BLOCK_N], SUM)
        if CONFIG.TMA:
            for k in range(0, K, BLOCK_K):
                x_tile = x.load([block_m * BLOCK_M, k])  # (BLOCK_M, BLOCK_K)
                w_tile = w.load([block_n * BLOCK_N, k])  # (BLOCK_N, BLOCK_K)
                acc = tl.dot(x_tile, w_tile.T, acc, out_dtype=SUM)
        else:
            offs_k = tl.arange(0, BLOCK_K)
            # Rows past the end are read again from the last: their sums are not stored.
            m64 = tl.minimum(offs_m, M - 1).to(tl.int64)
            n64 = tl.minimum(offs_n, N - 1).to(tl.int64)
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
        out = finished_tile(acc, tensors, at, K, CONFIG)
        to = tensors.out + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
        mask = at.inside_m[:, None] & at.inside_n[None, :]
        tl.store(to, out.to(tensors.out.dtype.element_ty), mask=mask)
