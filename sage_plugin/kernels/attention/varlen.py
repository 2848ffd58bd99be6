"""`attention_varlen()`: sequences of different lengths, packed one after another."""

from __future__ import annotations

from itertools import pairwise

import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention import validate
from sage_plugin.kernels.attention.backends.sdpa import host_attention
from sage_plugin.kernels.attention.call import AttentionCall, KernelRequest
from sage_plugin.kernels.attention.executor import decide
from sage_plugin.kernels.attention.torch_ops import text_of
from sage_plugin.kernels.contract import Packed
from sage_plugin.schema import LaunchConfig

__all__ = ["attention_varlen"]


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    kernel: str = "auto",
    variant: str = "auto",
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    launch: LaunchConfig | None = None,
    config_dir: str | None = None,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention inside each of several packed sequences, as if each were a call of its own.

    Sequence n has rows `cu_seqlens_q[n]` up to `cu_seqlens_q[n + 1]` of Q and those of
    `cu_seqlens_k` of K and V; the means and scales of quantisation are its own. Rows of Q past the
    last sequence are left unwritten.

    Args:
        q: `(Tq, Hq, D)`, all sequences one after another.
        k: `(Tk, Hk, D)` likewise, Hq a multiple of Hk.
        v: `(Tk, Hk, D)` likewise.
        cu_seqlens_q: int32 `(N + 1,)` on the device of Q, rising from 0. On a GPU its values are
            taken as they are: reading them would wait for the device.
        cu_seqlens_k: likewise, of K and V.
        max_seqlen_q: no sequence of Q is longer; rows beyond it would be lost.
        max_seqlen_k: no sequence of K is longer.
        is_causal: bottom-right aligned in each sequence.
        scale: factor of the scores, `1/sqrt(D)` if `None`.
        kernel: as in `attention`; with `"auto"`, what no kernel takes runs sequence by sequence on
            the host's attention.
        variant: as in `attention`.
        return_lse: also return the natural-log LSE, fp32 `(Hq, Tq)`, contiguous.
        out_dtype: dtype of the output, V's if `None`.
        launch: launch config in place of the looked-up one.
        config_dir: folder of configs searched before all others.
        window: as in `attention`, in each sequence.
        softcap: as in `attention`.
        sinks: as in `attention`.

    Returns:
        The output `(Tq, Hq, D)`, or `(output, lse)`.

    Raises:
        UnsupportedInputError: arguments that do not fit together, or a named kernel that cannot
            take them.
        UnknownKernelError: no kernel or variant of that name.
        ConfigError: a launch config that the device cannot run.

    Example:
        >>> import torch, sage_plugin
        >>> q, k, v = (torch.randn(30, 2, 32) for _ in range(3))
        >>> ends = torch.tensor([0, 10, 30], dtype=torch.int32)
        >>> sage_plugin.attention_varlen(q, k, v, ends, ends, 20, 20, kernel="sage").shape
        torch.Size([30, 2, 32])
    """
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _check_packed(q, k, v, packed)
    call = AttentionCall(
        q[None], k[None], v[None], None, 0.0, is_causal, scale, True, "bshd", softcap, sinks,
        return_lse, window, packed, out_dtype,
    )  # fmt: skip
    needs_grad = call.needs_grad
    decision, shape, _ = decide(call, KernelRequest(kernel, variant))
    if decision.reason is not None and kernel != "auto":
        raise validate.refusal(kernel, decision.reason)
    sides, cap, factor = validate.checked_rest(q, "bshd", window, softcap, scale, sinks)
    if needs_grad and return_lse:
        raise UnsupportedInputError(
            "return_lse cannot be had together with a gradient; drop one of them"
        )
    if needs_grad:
        out = _one_by_one(q, k, v, packed, is_causal, factor, sides, cap, sinks)
        return out if out_dtype is None else out.to(out_dtype)
    validate.check_runnable(decision, q.device, shape, launch)
    ops = torch.ops.sage_plugin
    op = ops.attention_varlen_with_lse if return_lse else ops.attention_varlen
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = op(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sinks, factor, is_causal,
        sides[0], sides[1], cap, decision.kernel, decision.variant, text_of(launch),
        str(config_dir or ""), out_dtype,
    )  # fmt: skip
    return result


def _check_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Packed) -> None:
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    if len(of_q) != 3 or len(of_k) != 3 or len(of_v) != 3:
        raise UnsupportedInputError(
            f"q, k and v have {len(of_q)}, {len(of_k)} and {len(of_v)} dimensions; packed ones "
            "need 3: (rows of all sequences, heads, head dim)"
        )
    if of_k[0] != of_v[0] or of_k[1] != of_v[1] or of_q[2] != of_k[2]:
        raise UnsupportedInputError(
            f"q {tuple(of_q)}, k {tuple(of_k)} and v {tuple(of_v)} do not fit together: "
            "key rows, key heads and head dim must agree"
        )
    validate.check_heads(of_q[1], of_k[1])
    validate.check_devices(q, k, v)
    for name, ends in (("q", packed.cu_seqlens_q), ("k", packed.cu_seqlens_k)):
        if ends.dtype != torch.int32 or len(ends.shape) != 1 or ends.device != q.device:
            raise UnsupportedInputError(
                f"cu_seqlens_{name} is {ends.dtype} {tuple(ends.shape)} on {ends.device}; it needs "
                f"int32 (sequences + 1,) on {q.device}"
            )
    count_q, count_k = packed.cu_seqlens_q.shape[0] - 1, packed.cu_seqlens_k.shape[0] - 1
    if count_q != count_k or count_q < 0:
        raise UnsupportedInputError(
            f"cu_seqlens_q is of {count_q} sequences and cu_seqlens_k of {count_k}; each needs one "
            "number more than there are sequences"
        )
    for name, longest in (("q", packed.max_seqlen_q), ("k", packed.max_seqlen_k)):
        if not isinstance(longest, int | torch.SymInt) or longest < 0:
            raise UnsupportedInputError(
                f"max_seqlen_{name} is {longest!r}; it needs an integer of at least 0"
            )


def _one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Packed, is_causal: bool,
    scale: float, window: tuple[int, int], softcap: float, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """The host's attention on each sequence, with a backward."""
    ends_q, ends_k = packed.cu_seqlens_q.tolist(), packed.cu_seqlens_k.tolist()
    parts = [q.new_zeros((0, q.shape[1], v.shape[2]), dtype=v.dtype)]
    for (start_q, end_q), (start_k, end_k) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        out = host_attention(
            q[None, start_q:end_q], k[None, start_k:end_k], v[None, start_k:end_k], None, 0.0,
            is_causal, scale, layout="bshd", window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        parts.append(out[0])
    rest = q.shape[0] - ends_q[-1]
    parts.append(parts[0].new_zeros((rest, *parts[0].shape[1:])))
    return torch.cat(parts)
