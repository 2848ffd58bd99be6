"""The host's attention: torch's own SDPA, behind the two-step contract and as the fallback."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention.backends.sequences import sequences
from sage_plugin.kernels.attention.mask import normalized
from sage_plugin.kernels.attention.oracle import exact, oracle
from sage_plugin.kernels.attention.visibility import hidden_by_mask, hidden_by_position
from sage_plugin.kernels.contract import (
    NO_WINDOW,
    AttentionParams,
    PlainOperands,
    ReadsInPlace,
    bhsd,
)


def host_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    layout: str = "bhsd",
    window: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` in either layout, with what it lacks.

    The first arguments are SDPA's. A causal call with Sq != Sk is bottom-right aligned here, where
    SDPA would align it top-left; a mask, a causal mask and a window hold together; rows without a
    visible key are 0. Calls with a softcap or sinks, which SDPA has none of, go to the oracle.

    Raises:
        UnsupportedInputError: dropout beside a softcap or sinks.
    """
    q, k, v = bhsd(q, layout), bhsd(k, layout), bhsd(v, layout)
    problem = AttentionParams(0.0, is_causal, "bhsd", None, window, softcap, sinks)
    if softcap or sinks is not None:
        out = _capped(q, k, v, attn_mask, dropout_p, scale, problem)
    else:
        out = _sdpa(q, k, v, attn_mask, dropout_p, scale, enable_gqa, problem)
    return out if layout == "bhsd" else out.transpose(1, 2)


def _capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    scale: float | None,
    problem: AttentionParams,
) -> torch.Tensor:
    if dropout_p:
        raise UnsupportedInputError(
            f"dropout_p is {dropout_p}; calls with a softcap or sinks have no dropout"
        )
    if attn_mask is not None:
        batch, heads_q, seq_q = q.shape[:3]
        attn_mask = normalized(
            attn_mask, batch=batch, heads_q=heads_q, seq_q=seq_q, seq_k=k.shape[2]
        )
    out, _ = oracle(
        q, k, v, is_causal=problem.causal, scale=scale, mask=attn_mask, window=problem.window,
        softcap=problem.softcap, sinks=problem.sinks,
        dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
    )  # fmt: skip
    return out.to(v.dtype)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
    problem: AttentionParams,
) -> torch.Tensor:
    is_causal = problem.causal
    bounded = problem.left >= 0 or (problem.right >= 0 and not is_causal)
    if bounded or (is_causal and (attn_mask is not None or q.shape[2] != k.shape[2])):
        attn_mask, is_causal = _both(attn_mask, _in_reach(q, k, problem)), False
    grouped = q.shape[1] != k.shape[1]
    if grouped and attn_mask is not None and k.shape[1] > 0:
        # With a mask, grouped heads would end in the backend that holds all scores (report 42).
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        enable_gqa = grouped = False
    options = {"enable_gqa": True} if enable_gqa or grouped else {}
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if attn_mask is None else _accepted(attn_mask, q.dtype),
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        **options,
    )
    if attn_mask is None:
        return out
    # SDPA makes NaN or the mean of V of them, by backend.
    dead = hidden_by_mask(attn_mask).all(-1, keepdim=True)
    return out.masked_fill(dead, 0.0)


def _in_reach(q: torch.Tensor, k: torch.Tensor, problem: AttentionParams) -> torch.Tensor:
    """`(Sq, Sk)` bool of the keys that the causal mask and the window leave to each row."""
    seq_q, seq_k = q.shape[2], k.shape[2]
    hidden = hidden_by_position(
        torch.arange(seq_q, device=q.device), 0, seq_k, seq_q=seq_q, seq_k=seq_k,
        left=problem.left, right=problem.right,
    )  # fmt: skip
    assert hidden is not None
    return ~hidden


def _both(attn_mask: torch.Tensor | None, keep: torch.Tensor) -> torch.Tensor:
    """A caller's mask, of either kind, and a boolean one in one mask."""
    if attn_mask is None:
        return keep
    if attn_mask.dtype == torch.bool:
        return attn_mask & keep
    return attn_mask.masked_fill(~keep, float("-inf"))


def _accepted(attn_mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask that SDPA takes beside queries of a dtype: bool, theirs, or fp32 but on a GPU."""
    if attn_mask.dtype in (torch.bool, dtype):
        return attn_mask
    if attn_mask.dtype == torch.float32 and not attn_mask.is_cuda:
        return attn_mask
    lowest = attn_mask.float().clamp_min(torch.finfo(dtype).min).to(dtype)
    return lowest.masked_fill(hidden_by_mask(attn_mask), float("-inf"))


class HostKernel(ReadsInPlace):
    """The kernel `sdpa`."""

    tuned = False

    def launch(
        self,
        operands: PlainOperands,
        *,
        out_dtype: torch.dtype | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """SDPA, a sequence at a time; the LSE, which SDPA does not return, is the oracle's."""
        ops, problem = operands, operands.problem
        parts = [
            (
                rows,
                host_attention(
                    q, k, v, problem.mask, 0.0, problem.causal, problem.scale,
                    window=problem.window, softcap=problem.softcap, sinks=problem.sinks,
                ),
            )
            for rows, q, k, v in sequences(problem, ops.q, ops.k, ops.v)
        ]  # fmt: skip
        if problem.packed is None:
            out = bhsd(parts[0][1], problem.layout)
        else:
            out = ops.v.new_zeros((*ops.q.shape[:3], ops.v.shape[3]))
            for rows, part in parts:
                bhsd(out, problem.layout)[:, :, rows] = part
        lse = exact(ops, problem)[1].contiguous() if return_lse else None
        return out.to(out_dtype or ops.v.dtype), lse
