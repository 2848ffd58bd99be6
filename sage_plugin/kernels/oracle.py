"""The oracle that judges everything: exact attention in fp32 or fp64, a chunk of rows at a time."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import torch

from sage_plugin.kernels.contract import PlainOperands, ReadsInPlace, bhsd

_lock = threading.RLock()
"""The switches belong to the process: two oracles at once must not restore each other's."""

CHUNK_ELEMENTS = 1 << 26
"""Scores held at once: 256 MiB in fp32."""


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    layout: str = "bhsd",
    key_bias: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention and its log-sum-exp, softmax over all scores of a row at once.

    Args:
        q: `(B, Hq, Sq, D)`, or `(B, Sq, Hq, D)` in layout `"bshd"`; k and v likewise, Hq % Hk == 0.
        k: keys.
        v: values, any channel count.
        is_causal: key j is visible to query i if j <= i + Sk - Sq (bottom-right aligned).
        scale: factor of the scores, `1/sqrt(D)` if `None`.
        layout: layout of the inputs and of the output.
        key_bias: `(B or 1, Hq or 1, Sk)` added to the scores, in natural-log units.
        rows: query rows to compute, `None` for all; the output then has `len(rows)` rows.
        dtype: `torch.float32` or `torch.float64`.

    Returns:
        The output in `dtype`, and the natural-log LSE `(B, Hq, rows)`. Rows without a visible key
        are 0 with LSE `-inf`.

    Example:
        >>> import torch
        >>> q = torch.ones(1, 1, 2, 4)
        >>> out, lse = oracle(q, q, q)
        >>> out.shape, round(lse[0, 0, 0].item(), 3)
        (torch.Size([1, 1, 2, 4]), 2.693)
    """
    q, k, v = bhsd(q, layout), bhsd(k, layout), bhsd(v, layout)
    batch, heads_q, seq_q, head_dim = q.shape
    seq_k, ratio = k.shape[2], heads_q // k.shape[1]
    rows = torch.arange(seq_q, device=q.device) if rows is None else rows.to(q.device)
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    out = torch.empty((batch, heads_q, len(rows), v.shape[3]), dtype=dtype, device=q.device)
    lse = torch.empty((batch, heads_q, len(rows)), dtype=dtype, device=q.device)
    step = max(1, CHUNK_ELEMENTS // max(1, seq_k))
    with _full_precision_matmul():
        for b in range(batch):
            for h in range(heads_q):
                keys, values = k[b, h // ratio].to(dtype), v[b, h // ratio].to(dtype)
                bias = None if key_bias is None else _bias_row(key_bias, b, h, dtype)
                for start in range(0, len(rows), step):
                    part = rows[start : start + step]
                    scores = (q[b, h, part].to(dtype) * scale) @ keys.T
                    if bias is not None:
                        scores += bias
                    if is_causal:
                        visible = torch.arange(seq_k, device=q.device)
                        scores.masked_fill_(
                            visible > part[:, None] + (seq_k - seq_q), float("-inf")
                        )
                    norm = torch.logsumexp(scores, -1)
                    weights = torch.exp(scores - norm.clamp_min(torch.finfo(dtype).min)[:, None])
                    out[b, h, start : start + step] = weights @ values
                    lse[b, h, start : start + step] = norm
    return (out if layout == "bhsd" else out.transpose(1, 2)), lse


def _bias_row(key_bias: torch.Tensor, b: int, h: int, dtype: torch.dtype) -> torch.Tensor:
    return key_bias[min(b, key_bias.shape[0] - 1), min(h, key_bias.shape[1] - 1)].to(dtype)


@contextlib.contextmanager
def _full_precision_matmul() -> Iterator[None]:
    """Keep TF32 out of the oracle whatever the caller has set, by torch's new switch or the old."""
    switches: list[Any] = [
        torch.backends.cuda.matmul,
        getattr(torch.backends.mkldnn, "matmul", None),
    ]
    new = [switch for switch in switches if hasattr(switch, "fp32_precision")]
    with _lock:
        before = [switch.fp32_precision for switch in new]
        old = None if new else torch.get_float32_matmul_precision()
        try:
            for switch in new:
                switch.fp32_precision = "ieee"
            if old is not None:
                torch.set_float32_matmul_precision("highest")
            yield
        finally:
            for switch, value in zip(new, before, strict=True):
                switch.fp32_precision = value
            if old is not None:
                torch.set_float32_matmul_precision(old)


class OracleKernel(ReadsInPlace):
    """The kernel `torch`: the oracle behind the two-step contract."""

    tuned = False

    def launch(
        self,
        operands: PlainOperands,
        *,
        out_dtype: torch.dtype | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Exact attention; cast once at the end."""
        problem = operands.problem
        out, lse = oracle(
            operands.q,
            operands.k,
            operands.v,
            is_causal=problem.causal,
            scale=problem.scale,
            layout=problem.layout,
        )
        out = out.to(out_dtype or operands.v.dtype)
        return out, (lse.contiguous() if return_lse else None)
