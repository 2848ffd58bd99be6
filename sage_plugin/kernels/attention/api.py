"""`attention()`: quantised attention as a function with SDPA's parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention import validate
from sage_plugin.kernels.attention.backends.sdpa import host_attention
from sage_plugin.kernels.attention.call import AttentionCall, KernelRequest
from sage_plugin.kernels.attention.executor import HOST_REQUEST, Executor, decide, resolve
from sage_plugin.kernels.attention.mask import mask_kind
from sage_plugin.kernels.attention.prologue.apply import runs_on_kernel, streams_of
from sage_plugin.kernels.attention.prologue.record import QkNorm, Rope
from sage_plugin.kernels.attention.torch_ops import text_of
from sage_plugin.kernels.contract import HOST, Decision
from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.kernels.support import ON_GPUS
from sage_plugin.kernels.surroundings import can_bypass_dispatcher
from sage_plugin.schema import LaunchConfig

__all__ = ["attention", "host_attention"]


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
    rope: Rope | tuple[torch.Tensor, torch.Tensor] | torch.Tensor | None = None,
    q_norm: QkNorm | None = None,
    k_norm: QkNorm | None = None,
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
        rope: rotary position embedding of Q and K: `(cos, sin)`, a complex tensor, or a `Rope`,
            which says what else there is to it.
        q_norm: norm of Q before it. On a GPU both are one pass over Q and K, in which a kernel
            that quantizes Q does so.
        k_norm: norm of K.

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
    call = with_prologue(
        AttentionCall(
            q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, layout, softcap, sinks,
            return_lse, window, out_dtype=out_dtype,
        ),
        rope, q_norm, k_norm,
    )  # fmt: skip
    min_seq = min_seq if kernel == "auto" else 0
    if can_bypass_dispatcher(*call.tensors()):
        resolved = resolve(call, KernelRequest(kernel, variant, launch, config_dir, min_seq))
        if isinstance(resolved, FallbackReason):
            return _on_host(call, kernel, resolved)
        return run(resolved, call)
    call = call.made()
    decision, _, mask = decide(call, KernelRequest(kernel, variant, min_seq=min_seq))
    if decision.reason is not None:
        return _on_host(call, kernel, decision.reason)
    return run_op(decision, call, mask, launch, config_dir)


def with_prologue(
    call: AttentionCall,
    rope: Rope | tuple[torch.Tensor, torch.Tensor] | torch.Tensor | None,
    q_norm: QkNorm | None,
    k_norm: QkNorm | None,
) -> AttentionCall:
    """Return a call whose Q and K get their norms and embedding first, or in its own kernels."""
    if rope is None and q_norm is None and k_norm is None:
        return call
    pair = streams_of(call.q, call.k, layout=call.layout, rope=rope, q_norm=q_norm, k_norm=k_norm)
    if not runs_on_kernel((*pair.q, *pair.k)):
        return call._replace(prologue=pair).made()
    q, k = pair.unmade(call.layout)
    return call._replace(q=q, k=k, prologue=pair)


def run(
    executor: Executor, call: AttentionCall
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run a resolved call in eager mode; its output, with the LSE if the call wants it."""
    if executor.decision.kernel == "sdpa" and _is_plain_sdpa(call):
        return _sdpa(call.made())
    out, lse = executor.run(call)
    return out if lse is None else (out, lse)


def run_op(
    decision: Decision,
    call: AttentionCall,
    mask: torch.Tensor | None,
    launch: LaunchConfig | None = None,
    config_dir: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run a decided call as a torch op, which compilers, modes and transforms see; traceable."""
    if decision.kernel == "sdpa" and _is_plain_sdpa(call):
        return _sdpa(call)
    q = call.q
    sides, cap, factor = validate.checked_rest(
        q, call.layout, call.window, call.softcap, call.scale, call.sinks
    )
    if launch is not None or (decision.variant in ON_GPUS and q.device.type == "cpu"):
        validate.check_runnable(decision, q.device, call.shape(mask_kind(mask)), launch)
    ops = torch.ops.sage_plugin
    op: Callable[..., Any] = ops.attention_with_lse if call.return_lse else ops.attention
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = op(
        q, call.k, call.v, mask, call.sinks, factor, call.is_causal, sides[0], sides[1], cap,
        decision.kernel, decision.variant, call.layout, text_of(launch),
        str(config_dir or ""), call.out_dtype,
    )  # fmt: skip
    return result


def _on_host(
    call: AttentionCall, kernel: str, reason: FallbackReason
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Leave a call to the host's attention, if no kernel was asked for by name."""
    if kernel != "auto":
        raise validate.refusal(kernel, reason)
    call = call.made()
    if _is_plain_sdpa(call):
        return _sdpa(call)
    if can_bypass_dispatcher(call.q, call.k, call.v, call.attn_mask, call.sinks):
        executor = resolve(call, HOST_REQUEST)
        assert isinstance(executor, Executor), "the host's attention takes every call"
        return run(executor, call)
    mask = validate.checked_mask(call.attn_mask, call.q, call.k, call.layout)
    return run_op(Decision("sdpa", HOST), call, mask)


def _is_plain_sdpa(call: AttentionCall) -> bool:
    """Whether SDPA itself takes a call: with dropout or a gradient, or nothing it does not know."""
    flows = call.dropout_p > 0.0 or call.needs_grad
    if flows and call.return_lse:
        raise UnsupportedInputError(
            "return_lse cannot be had together with dropout_p or a gradient; drop one of them"
        )
    return flows or not (call.return_lse or call.softcap or call.sinks is not None)


def _sdpa(call: AttentionCall) -> torch.Tensor:
    sides, cap, factor = validate.checked_rest(
        call.q, call.layout, call.window, call.softcap, call.scale, call.sinks
    )
    mask = call.attn_mask
    if mask is not None and mask.dim() < 2:  # SDPA does not broadcast so far
        mask = mask[(None,) * (2 - mask.dim())]
    out = host_attention(
        call.q, call.k, call.v, mask, call.dropout_p, call.is_causal, factor, call.enable_gqa,
        layout=call.layout, window=sides, softcap=cap, sinks=call.sinks,
    )  # fmt: skip
    return out if call.out_dtype is None else out.to(call.out_dtype)
