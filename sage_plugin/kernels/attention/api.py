"""`attention()`: quantised attention as a function with SDPA's parameters."""

from __future__ import annotations

import math

import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels import dispatch
from sage_plugin.kernels.attention import ops
from sage_plugin.kernels.attention.host import host_attention
from sage_plugin.kernels.contract import Decision
from sage_plugin.schema import LAYOUTS, LaunchConfig

__all__ = ["attention", "host_attention", "run_decided"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention on a quantised kernel.

    `kernel="auto"` takes the default kernel of the device and hands what that cannot do to the
    host's attention; a kernel asked for by name either runs or raises. On CPU tensors a named
    kernel runs as its exact emulation. Tensors are read in place through their strides and never
    written.

    Args:
        q: `(B, Hq, Sq, D)` in layout `"bhsd"`, `(B, Sq, Hq, D)` in `"bshd"`; fp16, bf16 or fp32,
            D up to 256.
        k: `(B, Hk, Sk, D)` likewise, Hq a multiple of Hk.
        v: `(B, Hk, Sk, D)` likewise.
        attn_mask: taken by the host's attention only.
        dropout_p: taken by the host's attention only.
        is_causal: key j is visible to query i if j <= i + Sk - Sq (bottom-right aligned).
        scale: factor of the scores, `1/sqrt(D)` if `None`.
        enable_gqa: accepted as SDPA does; grouped heads are recognised by their counts.
        kernel: `"auto"`, or one of `torch`, `sdpa`, `fav2`, `sage` (`qk_int8`), `fav3_sage`,
            `fav3_fp8`.
        variant: `"auto"`, `"portable"` or `"emulation"`.
        layout: layout of inputs and output.
        return_lse: also return the natural-log LSE, fp32 `(B, Hq, Sq)`, contiguous.
        out_dtype: dtype of the output, V's if `None`; `torch.float32` shows the result before
            rounding.
        launch: launch config in place of the looked-up one.
        config_dir: folder of configs searched before all others.
        min_seq: with `kernel="auto"`, calls whose shorter side is under it go to the host's
            attention.

    Returns:
        The output in Q's layout and memory order, or `(output, lse)`. Rows without a visible key
        are 0 with LSE `-inf`.

    Raises:
        UnsupportedInputError: shapes that do not fit together, or a named kernel that cannot take
            them.
        UnknownKernelError: no kernel or variant of that name.
        ConfigError: a launch config that the device cannot run.

    Source: SageAttention (arXiv 2410.02367), SageAttention2 (2411.10958), FlashAttention-3
    (2407.08608).

    Example:
        >>> import torch, sage_plugin
        >>> q, k, v = (torch.randn(1, 2, 64, 32) for _ in range(3))
        >>> sage_plugin.attention(q, k, v, kernel="sage").shape
        torch.Size([1, 2, 64, 32])
    """
    _check_tensors(q, k, v, layout)
    _check_dtypes(q, k, v, out_dtype)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    factor = 1.0 / math.sqrt(max(1, q.shape[3])) if scale is None else float(scale)
    decision = dispatch.decide(
        ops.shape_of(q, k, v, causal=is_causal, scale=factor, layout=layout),
        dispatch.facts_of(q.device.type, q.device.index),
        kernel=kernel,
        variant=variant,
        min_seq=min_seq if kernel == "auto" else 0,
        mask=attn_mask is not None,
        dropout=dropout_p,
        needs_grad=needs_grad,
    )
    if decision.reason is not None and kernel != "auto":
        raise UnsupportedInputError(
            f"kernel {kernel!r} cannot take this call: {decision.reason}; use kernel='auto' to let "
            "the host's attention take such calls"
        )
    if decision.kernel == "sdpa" and not return_lse:
        out = host_attention(
            q, k, v, attn_mask, dropout_p, is_causal, factor, enable_gqa, layout=layout
        )
        return out if out_dtype is None else out.to(out_dtype)
    if decision.kernel == "sdpa" and (attn_mask is not None or dropout_p > 0.0 or needs_grad):
        raise UnsupportedInputError(
            "return_lse cannot be had together with attn_mask, dropout_p or a gradient; "
            "drop one of them"
        )
    return run_decided(
        decision, q, k, v, is_causal=is_causal, scale=factor, layout=layout, return_lse=return_lse,
        out_dtype=out_dtype, launch=launch, config_dir=config_dir,
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run a call on the kernel and variant that `dispatch.decide` chose, through the torch op.

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
    """
    if decision.variant == "portable" and q.device.type == "cpu":
        _check_interpreter(decision)
    if launch is not None:
        _check_launch(decision, q, k, v, is_causal, scale, layout, launch)
    op = torch.ops.sage_plugin.attention_with_lse if return_lse else torch.ops.sage_plugin.attention
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = op(
        q, k, v, scale, is_causal, decision.kernel, decision.variant, layout,
        _text_of(launch), str(config_dir or ""), out_dtype,
    )  # fmt: skip
    return result


def _text_of(launch: LaunchConfig | None) -> str:
    """A launch config as the op takes it; a constant to a compiler, which cannot trace `json`."""
    return "" if launch is None else launch.text()


_text_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    if layout not in LAYOUTS:
        raise UnsupportedInputError(f"layout {layout!r} is not known; choose 'bhsd' or 'bshd'")
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise UnsupportedInputError(
            f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dimensions; "
            f"each needs 4 ({layout})"
        )
    heads, seq = (1, 2) if layout == "bhsd" else (2, 1)
    fits = (
        q.shape[0] == k.shape[0] == v.shape[0]
        and k.shape[heads] == v.shape[heads]
        and k.shape[seq] == v.shape[seq]
        and q.shape[3] == k.shape[3]
    )
    if not fits:
        raise UnsupportedInputError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together in "
            f"layout {layout!r}: batch, key length, key heads and head dim must agree"
        )
    if k.shape[heads] == 0 or q.shape[heads] % k.shape[heads] != 0:
        raise UnsupportedInputError(
            f"{q.shape[heads]} query heads do not divide into {k.shape[heads]} key heads; "
            "repeat K and V to a divisor of the query heads"
        )
    if not q.device == k.device == v.device:
        raise UnsupportedInputError(
            f"q, k and v are on {q.device}, {k.device} and {v.device}; move them to one device"
        )


def _check_dtypes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_dtype: torch.dtype | None
) -> None:
    if q.dtype not in FLOATS or k.dtype not in FLOATS or v.dtype not in FLOATS:
        raise UnsupportedInputError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; each needs float16, bfloat16, "
            "float32 or, on the host's attention, float64"
        )
    if out_dtype is not None and out_dtype not in FLOATS:
        raise UnsupportedInputError(
            f"out_dtype {out_dtype} is not supported; choose float16, bfloat16 or float32"
        )


def _check_interpreter(decision: Decision) -> None:
    from sage_plugin import settings

    if not settings.triton_interpreted():
        raise UnsupportedInputError(
            f"kernel {decision.label} runs on a GPU and the tensors are on the CPU; move them, use "
            "variant='emulation', or set TRITON_INTERPRET=1 to run it in Triton's interpreter"
        )


def _check_launch(
    decision: Decision, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    is_causal: bool, scale: float, layout: str, launch: LaunchConfig,
) -> None:  # fmt: skip
    key = dispatch.call_key(
        ops.shape_of(q, k, v, causal=is_causal, scale=scale, layout=layout), decision
    )
    facts = dispatch.facts_of(q.device.type, q.device.index)
    if reason := dispatch.illegal_reason(launch, key, facts):
        raise UnsupportedInputError(f"launch config {launch.text()} cannot run here: {reason}")
