"""The oracle that judges everything: exact attention in fp32 or fp64, a chunk of rows at a time."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sage_plugin.kernels.attention.backends.sequences import sequences
from sage_plugin.kernels.attention.visibility import (
    added_by_mask,
    hidden_by_mask,
    hidden_by_position,
)
from sage_plugin.kernels.contract import (
    NO_WINDOW,
    AttentionParams,
    PlainOperands,
    ReadsInPlace,
    bhsd,
)

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
    mask: torch.Tensor | None = None,
    window: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
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
        mask: `(B or 1, Hq or 1, Sq or 1, Sk)`, bool (True is visible) or float (added to the
            scores, in natural-log units).
        window: keys that a row sees to the left and right of its own position, -1 for all.
        softcap: scores become `softcap * tanh(score / softcap)` before the mask; 0 for none.
        sinks: `(Hq,)`, one more logit a head that takes weight and has no value.
        rows: query rows to compute, `None` for all; the output then has `len(rows)` rows.
        dtype: `torch.float32` or `torch.float64`.

    Returns:
        The output in `dtype`, and the natural-log LSE `(B, Hq, rows)`, sinks included. Rows without
        a visible key are 0 with LSE `-inf`, or the sink. NaN and infinite values of K and V reach
        the rows that see their key, as NaN, and no other.

    Example:
        >>> import torch
        >>> q = torch.ones(1, 1, 2, 4)
        >>> out, lse = oracle(q, q, q)
        >>> out.shape, round(lse[0, 0, 0].item(), 3)
        (torch.Size([1, 1, 2, 4]), 2.693)
    """
    q, k, v = bhsd(q, layout), bhsd(k, layout), bhsd(v, layout)
    batch, heads_q, seq_q, head_dim = q.shape
    ratio = heads_q // k.shape[1]
    rows = torch.arange(seq_q, device=q.device) if rows is None else rows.to(q.device)
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    problem = AttentionParams(scale, is_causal, "bhsd", mask, window, softcap, sinks)
    out = torch.empty((batch, heads_q, len(rows), v.shape[3]), dtype=dtype, device=q.device)
    lse = torch.empty((batch, heads_q, len(rows)), dtype=dtype, device=q.device)
    step = max(1, CHUNK_ELEMENTS // max(1, k.shape[2]))
    finite = bool((torch.isfinite(k).all() & torch.isfinite(v).all()).item())
    with _full_precision_matmul():
        for b in range(batch):
            for h in range(heads_q):
                keys = _keys(k[b, h // ratio].to(dtype), v[b, h // ratio].to(dtype), finite)
                sees = None if mask is None else mask[b % mask.shape[0], h % mask.shape[1]]
                for start in range(0, len(rows), step):
                    part = rows[start : start + step]
                    scores = _scores(q[b, h, part].to(dtype), part, keys, problem, seq_q, sees)
                    chunk = slice(start, start + step)
                    out[b, h, chunk], lse[b, h, chunk] = _softmax(
                        scores, keys, None if sinks is None else sinks[h].to(dtype)
                    )
    return (out if layout == "bhsd" else out.transpose(1, 2)), lse


@dataclass(frozen=True, slots=True)
class _Keys:
    """K and V of a head; where one holds NaN or infinite values, those are 0 and marked.

    Attributes:
        k: `(Sk, D)`.
        v: `(Sk, Dv)`.
        bad_k: `(Sk,)` bool, `None` where all values are finite.
        bad_v: `(Sk, Dv)` 0 or 1, `None` likewise.
    """

    k: torch.Tensor
    v: torch.Tensor
    bad_k: torch.Tensor | None = None
    bad_v: torch.Tensor | None = None


def _keys(k: torch.Tensor, v: torch.Tensor, finite: bool) -> _Keys:
    if finite:
        return _Keys(k, v)
    good_k, good_v = torch.isfinite(k), torch.isfinite(v)
    clean_k, clean_v = (x.where(good, 0.0) for x, good in ((k, good_k), (v, good_v)))
    return _Keys(clean_k, clean_v, ~good_k.all(-1), (~good_v).to(v.dtype))


def _scores(
    queries: torch.Tensor,
    rows: torch.Tensor,
    keys: _Keys,
    problem: AttentionParams,
    seq_q: int,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """`(rows, Sk)` scores of one head, `-inf` where hidden; `mask` is `(Sq or 1, Sk)`."""
    seq_k = len(keys.k)
    scores = (queries * problem.scale) @ keys.k.T
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if keys.bad_k is not None:
        scores = scores.masked_fill(keys.bad_k, float("nan"))
    if mask is not None:
        mask = mask if len(mask) == 1 else mask[rows]
        bias = added_by_mask(mask, scores.dtype)
        if bias is not None:
            scores += bias
        scores.masked_fill_(hidden_by_mask(mask), float("-inf"))
    hidden = hidden_by_position(
        rows, 0, seq_k, seq_q=seq_q, seq_k=seq_k, left=problem.left, right=problem.right
    )
    return scores if hidden is None else scores.masked_fill_(hidden, float("-inf"))


def _softmax(
    scores: torch.Tensor, keys: _Keys, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sums of V and the LSE of some rows."""
    top = scores.new_full(scores.shape[:1], torch.finfo(scores.dtype).min)
    if scores.shape[1]:
        top = torch.maximum(top, scores.amax(-1))
    top = top if sink is None else torch.maximum(top, sink)
    weights = torch.exp(scores - top[:, None])
    norm = weights.sum(-1)
    norm = norm if sink is None else norm + torch.exp(sink - top)
    out = weights @ keys.v / norm.masked_fill(norm == 0, 1.0)[:, None]
    if keys.bad_v is not None:
        visible = (scores != float("-inf")).to(scores.dtype)
        out = out.masked_fill(visible @ keys.bad_v > 0, float("nan"))
    return out, torch.log(norm) + top


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
        """Exact attention, a sequence at a time; cast once at the end."""
        problem = operands.problem
        dtype = out_dtype or operands.v.dtype
        out, lse = exact(operands, problem)
        return out.to(dtype), (lse.contiguous() if return_lse else None)


def exact(operands: PlainOperands, problem: AttentionParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle on a whole problem, in fp32; rows of no sequence are 0 with LSE `-inf`."""
    q, v = operands.q, operands.v
    heads, seq_q = bhsd(q, problem.layout).shape[1:3]
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=torch.float32)
    lse = q.new_full((q.shape[0], heads, seq_q), float("-inf"), dtype=torch.float32)
    for rows, *qkv in sequences(problem, q, operands.k, v):
        bhsd(out, problem.layout)[:, :, rows], lse[:, :, rows] = oracle(
            *qkv, is_causal=problem.causal, scale=problem.scale, mask=problem.mask,
            window=problem.window, softcap=problem.softcap, sinks=problem.sinks,
        )  # fmt: skip
    return out, lse
