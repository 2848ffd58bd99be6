"""Exact attention to judge by: sampled rows of every head, computed once for the same contents."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from sage_plugin.accuracy.fingerprint import fingerprint
from sage_plugin.accuracy.output import ExactRows
from sage_plugin.kernels.attention.oracle import oracle
from sage_plugin.kernels.attention.visibility import hidden_by_mask, hidden_by_position
from sage_plugin.kernels.contract import NO_WINDOW, AttentionParams

MAX_ROWS = 256
EDGE_ROWS = 4
CACHED = 8

_CACHE: OrderedDict[tuple[object, ...], ExactRows] = OrderedDict()


def sample_rows(seq_q: int, *, limit: int = MAX_ROWS, seed: int = 0) -> torch.Tensor:
    """Choose query rows to judge: all of a short call, else a sample with first and last ones.

    Example:
        >>> rows = sample_rows(1000, limit=16)
        >>> len(rows), rows[:4].tolist(), rows[-1].item()
        (16, [0, 1, 2, 3], 999)
    """
    if seq_q <= limit:
        return torch.arange(seq_q)
    edge = min(EDGE_ROWS, limit // 4)
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randperm(seq_q - 2 * edge, generator=generator)[: limit - 2 * edge] + edge
    edges = torch.arange(edge)
    return torch.cat([edges, inner.sort().values, edges + (seq_q - edge)])


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    window: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> ExactRows:
    """Compute the oracle's rows for these inputs; kept for the last few distinct contents.

    Args:
        q: (B, Hq, Sq, D), indexed bhsd; k and v likewise.
        k: keys.
        v: values.
        causal: bottom-right aligned causal mask.
        scale: factor of the scores, `1/sqrt(D)` if `None`.
        mask: (B or 1, Hq or 1, Sq or 1, Sk), as the oracle takes it.
        window: keys that a row sees to its left and right, -1 for all.
        softcap: cap of the scores, 0 for none.
        sinks: (Hq,), one more logit a head, or `None`.
        rows: query rows; `sample_rows` where `None`.

    Example:
        >>> x = torch.ones(1, 1, 2, 4)
        >>> reference(x, x, x).out.shape
        torch.Size([1, 1, 2, 4])
    """
    chosen = sample_rows(q.shape[2]) if rows is None else rows
    key = (
        *(None if tensor is None else fingerprint(tensor) for tensor in (q, k, v, mask, sinks)),
        tuple(chosen.tolist()),
        causal,
        scale,
        window,
        softcap,
        str(q.device),
    )
    if key in _CACHE:
        _CACHE.move_to_end(key)
        return _CACHE[key]
    chosen = chosen.to(q.device)
    out, _ = oracle(
        q, k, v, is_causal=causal, scale=scale, mask=mask, window=window, softcap=softcap,
        sinks=sinks, rows=chosen,
    )  # fmt: skip
    mean = visible_mean(
        v, chosen, seq_q=q.shape[2], heads_q=q.shape[1], causal=causal, mask=mask, window=window
    )
    _CACHE[key] = ExactRows(rows=chosen, out=out, mean=mean)
    if len(_CACHE) > CACHED:
        _CACHE.popitem(last=False)
    return _CACHE[key]


def clear() -> None:
    """Drop the kept references, and the device memory that they hold."""
    _CACHE.clear()


def visible_mean(
    v: torch.Tensor,
    rows: torch.Tensor,
    *,
    seq_q: int,
    heads_q: int,
    causal: bool,
    mask: torch.Tensor | None = None,
    window: tuple[int, int] = NO_WINDOW,
) -> torch.Tensor:
    """Average V over the keys that each row sees, zero where it sees none.

    Args:
        v: (B, Hk, Sk, Dv).
        rows: query rows.
        seq_q: query length, for the bottom-right alignment.
        heads_q: query heads.
        causal: whether later keys are hidden.
        mask: (B or 1, Hq or 1, Sq or 1, Sk); a key is seen whatever its finite bias.
        window: keys that a row sees to its left and right, -1 for all.

    Returns:
        (B, Hq, R, Dv), or (B, Hq, 1, Dv) where all rows see all keys, fp32.
    """
    if mask is not None or window != NO_WINDOW:
        sight = _Sight(rows, seq_q, v.shape[2], AttentionParams(0.0, causal, "bhsd", mask, window))
        return _mean_in_sight(v, sight, heads_q)
    batch, heads_k, seq_k, _ = v.shape
    means = [
        _head_mean(v[b, h], rows + (seq_k - seq_q) if causal else None)
        for b in range(batch)
        for h in range(heads_k)
    ]
    stacked = torch.stack(means).view(batch, heads_k, -1, v.shape[3])
    return stacked.repeat_interleave(heads_q // heads_k, dim=1)


def _head_mean(v: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
    if last is None:
        return v.double().mean(0, keepdim=True).float()
    running = v.double().cumsum(0)
    counts = (last + 1).clamp(0, v.shape[0])
    seen = running[(counts - 1).clamp_min(0)] / counts.clamp_min(1)[:, None]
    return (seen * (counts > 0)[:, None]).float()


@dataclass(frozen=True, slots=True)
class _Sight:
    """What some rows see; asked for head by head, so that no mask is ever expanded."""

    rows: torch.Tensor
    seq_q: int
    seq_k: int
    problem: AttentionParams

    def of(self, b: int, h: int) -> torch.Tensor:
        """`(rows, Sk)` bool of one head."""
        rows, problem = self.rows, self.problem
        hidden = hidden_by_position(
            rows, 0, self.seq_k, seq_q=self.seq_q, seq_k=self.seq_k, left=problem.left,
            right=problem.right,
        )  # fmt: skip
        if hidden is None:
            hidden = torch.zeros(len(rows), self.seq_k, dtype=torch.bool, device=rows.device)
        if (mask := problem.mask) is not None:
            of_head = mask[b % mask.shape[0], h % mask.shape[1]]
            hidden = hidden | hidden_by_mask(of_head if len(of_head) == 1 else of_head[rows])
        return ~hidden


def _mean_in_sight(v: torch.Tensor, sight: _Sight, heads_q: int) -> torch.Tensor:
    batch, heads_k = v.shape[:2]
    out = v.new_empty((batch, heads_q, len(sight.rows), v.shape[3]), dtype=torch.float32)
    for b in range(batch):
        for h in range(heads_q):
            seen = sight.of(b, h).double()
            values = torch.nan_to_num(v[b, h * heads_k // heads_q].double(), posinf=0.0, neginf=0.0)
            out[b, h] = (seen @ values / seen.sum(-1).clamp_min(1)[:, None]).float()
    return out
