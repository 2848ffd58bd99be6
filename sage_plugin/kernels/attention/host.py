"""The host's attention: torch's own SDPA, behind the two-step contract and as the fallback."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sage_plugin.kernels.contract import PlainOperands, ReadsInPlace, bhsd
from sage_plugin.kernels.oracle import oracle


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
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` in either layout.

    Arguments are SDPA's. A causal call with Sq != Sk is bottom-right aligned here, where SDPA would
    align it top-left, and one with a mask gets both; rows without a visible key are 0.

    Example:
        >>> import torch
        >>> x = torch.ones(1, 3, 2, 4)
        >>> host_attention(x, x, x, layout="bshd").shape
        torch.Size([1, 3, 2, 4])
    """
    q, k, v = bhsd(q, layout), bhsd(k, layout), bhsd(v, layout)
    dead = 0
    if is_causal and (attn_mask is not None or q.shape[2] != k.shape[2]):
        rows = torch.arange(q.shape[2], device=q.device)[:, None] + (k.shape[2] - q.shape[2])
        keep = torch.arange(k.shape[2], device=q.device)[None, :] <= rows
        dead = max(0, q.shape[2] - k.shape[2])
        attn_mask, is_causal = _both(attn_mask, keep), False
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
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        **options,
    )
    if dead:
        out = torch.cat([torch.zeros_like(out[:, :, :dead]), out[:, :, dead:]], 2)
    return out if layout == "bhsd" else out.transpose(1, 2)


def _both(attn_mask: torch.Tensor | None, keep: torch.Tensor) -> torch.Tensor:
    """A caller's mask, of either kind, and a boolean one in one mask."""
    if attn_mask is None:
        return keep
    if attn_mask.dtype == torch.bool:
        return attn_mask & keep
    return attn_mask.masked_fill(~keep, float("-inf"))


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
        """SDPA; the LSE, which SDPA does not return, comes from the oracle."""
        ops, problem = operands, operands.problem
        out = host_attention(
            ops.q, ops.k, ops.v, None, 0.0, problem.causal, problem.scale, layout=problem.layout
        )
        lse = None
        if return_lse:
            _, lse = oracle(
                ops.q, ops.k, ops.v,
                is_causal=problem.causal, scale=problem.scale, layout=problem.layout,
            )  # fmt: skip
            lse = lse.contiguous()
        return out.to(out_dtype or ops.v.dtype), lse
