"""The sequences of a call, one at a time: those of a packed call, or the call itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sage_plugin.kernels.contract import AttentionParams, bhsd


def sequences(
    problem: AttentionParams, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Rows of the output, and `(B, H, S, D)` views of Q, K and V; reads the bounds on the host.

    Sequences without queries are left out; one without keys has an empty K and V.
    """
    q, k, v = (bhsd(x, problem.layout) for x in (q, k, v))
    if problem.packed is None:
        yield slice(None), q, k, v
        return
    q_ends, k_ends = problem.packed.cu_seqlens_q.tolist(), problem.packed.cu_seqlens_k.tolist()
    bounds = zip(q_ends[:-1], q_ends[1:], k_ends[:-1], k_ends[1:], strict=True)
    for first_q, end_q, first_k, end_k in bounds:
        if end_q > first_q:
            rows, keys = slice(first_q, end_q), slice(first_k, end_k)
            yield rows, q[:, :, rows], k[:, :, keys], v[:, :, keys]
