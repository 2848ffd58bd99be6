"""`attention()`: quantised attention as a function with SDPA's parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention import torch_ops, validate
from sage_plugin.kernels.attention.backends.sdpa import host_attention
from sage_plugin.kernels.attention.executor import Executor, decided, settled
from sage_plugin.kernels.attention.mask import mask_kind
from sage_plugin.kernels.attention.runtime import can_bypass_dispatcher, shape_of
from sage_plugin.kernels.attention.torch_ops import text_of
from sage_plugin.kernels.contract import NO_WINDOW, AttentionParams, Decision, plain_problem
from sage_plugin.kernels.support import ON_GPUS
from sage_plugin.schema import LaunchConfig

__all__ = ["attention", "host_attention", "run_decided"]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    kernel: str = "auto",
    variant: str = "auto",
    layout: str = "bhsd",
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    launch: LaunchConfig | None = None,
    config_dir: str | None = None,
    min_seq: int = 0,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention on a quantised kernel.

    `kernel="auto"` takes the default kernel of the device and hands what that cannot do to the
    host's attention; a kernel asked for by name either runs or raises. On CPU tensors a named
    kernel runs as its exact emulation. Tensors are read in place through their strides and never
    written.

    A score is `scale * q.k`, then `softcap * tanh(score / softcap)`, then plus the float mask; a
    key that mask, causality or window hides from a query has no part in its softmax.

    Args:
        q: `(B, Hq, Sq, D)` in layout `"bhsd"`, `(B, Sq, Hq, D)` in `"bshd"`; fp16, bf16 or fp32,
            D up to 256.
        k: `(B, Hk, Sk, D)` likewise, Hq a multiple of Hk.
        v: `(B, Hk, Sk, D)` likewise.
        attn_mask: bool (True is visible) or float (natural-log units, added to the scores),
            broadcastable to `(B, Hq, Sq, Sk)` whatever the layout; values under -1e38 hide a key.
        dropout_p: taken by the host's attention only.
        is_causal: key j is visible to query i if j <= i + Sk - Sq (bottom-right aligned), together
            with mask and window where they are given.
        scale: factor of the scores, `1/sqrt(D)` if `None`; any finite number, 0 averages V.
        enable_gqa: accepted as SDPA does; grouped heads are recognised by their counts.
        kernel: `"auto"`, or one of `torch`, `sdpa`, `fav2`, `sage` (`qk_int8`), `fav3_sage`,
            `fav3_fp8`.
        variant: `"auto"`, `"portable"`, `"hopper"` or `"emulation"`.
        layout: layout of inputs and output.
        return_lse: also return the natural-log LSE, fp32 `(B, Hq, Sq)`, contiguous.
        out_dtype: dtype of the output, V's if `None`; `torch.float32` shows the result before
            rounding.
        launch: launch config in place of the looked-up one.
        config_dir: folder of configs searched before all others.
        min_seq: with `kernel="auto"`, calls whose shorter side is under it go to the host's
            attention.
        window: keys to the left and to the right of its own position (i + Sk - Sq) that a query
            sees besides it, -1 for all.
        softcap: bound of the scores before any mask, 0 for none.
        sinks: `(Hq,)` float, one more logit a head that takes weight and has no value; it is part
            of the LSE.

    Returns:
        The output in Q's layout and memory order, or `(output, lse)`. Rows without a visible key
        are 0 with LSE `-inf`, or that of their sink.

    Raises:
        UnsupportedInputError: arguments that do not fit together, or a named kernel that cannot
            take them.
        UnknownKernelError: no kernel or variant of that name.
        ConfigError: a launch config that the device cannot run.

    Source: SageAttention (arXiv 2410.02367), SageAttention2 (2411.10958), FlashAttention-3
    (2407.08608).

    Example:
        >>> import torch, sage_plugin
        >>> q, k, v = (torch.randn(1, 2, 64, 32) for _ in range(3))
        >>> padding = torch.arange(64) < 50
        >>> sage_plugin.attention(q, k, v, padding, kernel="sage").shape
        torch.Size([1, 2, 64, 32])
    """
    validate.check_out_dtype(out_dtype)
    needs_grad = validate.wants_gradient(q, k, v, attn_mask, sinks)
    special = validate.is_special(window, softcap, sinks)
    plan: Executor | None = None
    if can_bypass_dispatcher(q, k, v, attn_mask, sinks):
        plan, mask = settled(
            q, k, v, attn_mask, is_causal, layout, kernel, variant, launch, config_dir, min_seq,
            dropout_p, needs_grad, special,
        )  # fmt: skip
        decision = plan.decision
    else:
        decision, _, mask = decided(
            q, k, v, attn_mask, causal=is_causal, layout=layout, kernel=kernel, variant=variant,
            min_seq=min_seq, dropout=dropout_p, needs_grad=needs_grad,
            special=special,
        )  # fmt: skip
    sides, cap, factor = validate.checked_rest(q, layout, window, softcap, scale, sinks)
    flows = needs_grad or dropout_p > 0.0
    if decision.kernel == "sdpa" and flows and return_lse:
        raise UnsupportedInputError(
            "return_lse cannot be had together with dropout_p or a gradient; drop one of them"
        )
    beyond_sdpa = return_lse or cap > 0.0 or sinks is not None
    if decision.kernel == "sdpa" and (flows or not beyond_sdpa):
        if attn_mask is not None and attn_mask.dim() < 2:  # SDPA does not broadcast so far
            attn_mask = attn_mask[(None,) * (2 - attn_mask.dim())]
        out = host_attention(
            q, k, v, attn_mask, dropout_p, is_causal, factor, enable_gqa, layout=layout,
            window=sides, softcap=cap, sinks=sinks,
        )  # fmt: skip
        return out if out_dtype is None else out.to(out_dtype)
    if plan is not None:
        if mask is None and sinks is None:
            problem = plain_problem(factor, is_causal, layout, sides, cap)
        else:
            problem = AttentionParams(factor, is_causal, layout, mask, sides, cap, sinks)
        out, lse = plan.run(q, k, v, problem, out_dtype=out_dtype, return_lse=return_lse)
        return out if lse is None else (out, lse)
    return run_decided(
        decision, q, k, v, is_causal=is_causal, scale=factor, layout=layout, return_lse=return_lse,
        out_dtype=out_dtype, launch=launch, config_dir=config_dir, mask=mask, window=sides,
        softcap=cap, sinks=sinks,
    )  # fmt: skip


def run_decided(
    decision: Decision,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool,
    scale: float,
    layout: str,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    launch: LaunchConfig | None = None,
    config_dir: str | None = None,
    mask: torch.Tensor | None = None,
    window: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run a call on the kernel and variant that `dispatch.decide` chose, as the torch op does.

    Args:
        decision: what was decided.
        q: queries, as in `attention`; k and v likewise.
        k: keys.
        v: values.
        is_causal: bottom-right aligned causal mask.
        scale: factor of the scores.
        layout: layout of inputs and output.
        return_lse: also return the LSE.
        out_dtype: dtype of the output.
        launch: launch config in place of the looked-up one; checked for legality here.
        config_dir: folder of configs searched first.
        mask: mask as `attention.mask.normalized` leaves it.
        window: keys to the left and to the right, -1 for all.
        softcap: bound of the scores, 0 for none.
        sinks: one logit a query head.
    """
    call: Callable[..., Any] = (
        torch_ops.attention_with_lse_now if return_lse else torch_ops.attention_now
    )
    if not can_bypass_dispatcher(q, k, v, mask, sinks):
        if launch is not None or (decision.variant in ON_GPUS and q.device.type == "cpu"):
            shape = shape_of(
                q, k, v, causal=is_causal, scale=scale, layout=layout, mask_kind=mask_kind(mask)
            )
            validate.check_runnable(decision, q.device, shape, launch)
        ours = torch.ops.sage_plugin
        call = ours.attention_with_lse if return_lse else ours.attention
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = call(
        q, k, v, mask, sinks, scale, is_causal, window[0], window[1], softcap, decision.kernel,
        decision.variant, layout, text_of(launch), str(config_dir or ""), out_dtype,
    )  # fmt: skip
    return result
