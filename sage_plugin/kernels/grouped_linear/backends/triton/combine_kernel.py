"""The Triton kernel that sums what the experts of a token gave, and its launch code."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.launch_config import Memo
from sage_plugin.kernels.repeats import Repeats, repeats_of

WIDTH = 1024
"""Columns of a program at most, eight a thread."""


@triton.jit
def combine_rows_kernel(
    rows, weights, places, out, N, widths, K: tl.constexpr, WIDTH: tl.constexpr
):
    """Sum the K rows of a token with their weights; one program some columns of a token."""
    token = (tl.program_id(0) // widths).to(tl.int64)
    offs_n = tl.program_id(0) % widths * WIDTH + tl.arange(0, WIDTH)
    acc = tl.zeros([WIDTH], tl.float32)
    for choice in tl.static_range(K):
        row = tl.load(places + token * K + choice).to(tl.int64)
        weight = tl.load(weights + token * K + choice).to(tl.float32)
        values = tl.load(rows + row * N + offs_n, mask=offs_n < N, other=0.0)  # (WIDTH)
        acc += weight * values.to(tl.float32)
    tl.store(out + token * N + offs_n, acc.to(out.dtype.element_ty), mask=offs_n < N)


_repeats: Memo[Repeats] = Memo(4096)


def combine_triton(
    rows: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Sum the rows of each token; see `routing.combined`.

    Args:
        rows: `(S * k, N)` contiguous.
        weights: `(S, k)`.
        places: `(S, k)` row of each choice.
        dtype: dtype of the output.
    """
    tensors = (rows, weights.contiguous(), places)
    if not rows.is_cuda:
        return _combine(*tensors, dtype)[0]
    key = (rows.shape, rows.dtype, rows.device, weights.shape, weights.dtype, dtype)
    known = repeats_of(_repeats, key)
    return known.repeat(tensors, rows.device, _combine, *tensors, dtype)[0]


def _combine(
    rows: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, None]:
    tokens, choices = weights.shape
    columns = rows.shape[1]
    out = torch.empty((tokens, columns), dtype=dtype, device=rows.device)
    width = min(WIDTH, max(128, triton.next_power_of_2(columns)))
    widths = -(-columns // width)
    launch_graph.launch(
        combine_rows_kernel, tokens * widths, rows, weights, places, out, columns, widths,
        K=choices, WIDTH=width, num_warps=4,  # not tuned: bytes decide
    )  # fmt: skip
    return out, None
