"""One attention call as it comes through a door, and what is asked to compute it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention.mask import MASK_DTYPES, normalized
from sage_plugin.kernels.attention.prologue import apply
from sage_plugin.kernels.attention.prologue.pair import QkPair
from sage_plugin.kernels.contract import Packed
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.kernels.surroundings import wants_gradient, without_autocast
from sage_plugin.schema import CallShape, LaunchConfig

TENSOR_SUBCLASS = FallbackReason(Fallback.TENSOR_SUBCLASS)
MASK_SHAPE = FallbackReason(Fallback.MASK_SHAPE)
MASK_DEVICE = FallbackReason(Fallback.MASK_DEVICE)

TRACERS = ("torch._subclasses.fake_tensor", "torch._subclasses.functional_tensor")
"""Where torch has the tensors that stand for others while it traces."""

_DTYPE_NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


class KernelRequest(NamedTuple):
    """What shall compute a call.

    Attributes:
        kernel: kernel name, alias or `"auto"`.
        variant: variant name or `"auto"`.
        launch: launch config in place of the looked-up one.
        config_dir: folder of configs searched before all others.
        min_seq: calls whose shorter side is under it stay with the host's attention.
        changes: fields of the looked-up launch config that are changed, each with its value.
        let_through: for a patched layer's call, the `min_seq` and `enable_gqa` by which it was let
            through before it is resolved; part of the key alone.
    """

    kernel: str = "auto"
    variant: str = "auto"
    launch: LaunchConfig | None = None
    config_dir: str | None = None
    min_seq: int = 0
    changes: tuple[tuple[str, object], ...] = ()
    let_through: tuple[int, bool] | None = None


class AttentionCall(NamedTuple):
    """The arguments of one attention call, in the words of SDPA.

    Attributes:
        q: queries; k and v likewise.
        k: keys.
        v: values.
        attn_mask: bool or float mask as it was given.
        dropout_p: dropout probability.
        is_causal: causal mask.
        scale: factor of the scores, `None` for `1/sqrt(D)`.
        enable_gqa: whether fewer heads of K and V are meant to serve groups of Q's.
        layout: `"bhsd"` or `"bshd"`.
        softcap: bound of the scores, 0 for none; SDPA knows none.
        sinks: one more logit per query head, likewise.
        return_lse: whether the LSE is wanted too.
        window: keys to the left and to the right that a query sees; SDPA knows none.
        packed: ends of the sequences in Q, K and V, if there are several in one.
        out_dtype: dtype of the output, V's if `None`.
        prologue: norm and rotary embedding that are still to be done; Q and K are `Unmade` then.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    layout: str = "bhsd"
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    return_lse: bool = False
    window: tuple[int, int] | None = None
    packed: Packed | None = None
    out_dtype: torch.dtype | None = None
    prologue: QkPair | None = None

    def factor(self) -> float:
        """Return the factor of the scores before softmax."""
        return float(max(1, self.q.shape[-1]) ** -0.5) if self.scale is None else self.scale

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient has to flow through the call."""
        if self.prologue is not None:  # which is for no call that does
            return wants_gradient(self.v, self.attn_mask, self.sinks)
        return wants_gradient(self.q, self.k, self.v, self.attn_mask, self.sinks)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.q.device

    @property
    def is_special(self) -> bool:
        """Whether it has what portable variants alone take, but for its mask."""
        return (
            self.window is not None
            or bool(self.softcap)
            or self.sinks is not None
            or self.packed is not None
        )

    def key(self) -> tuple[object, ...]:
        """Return all that an answer follows from: the call without its data.

        True is no number of a window, though it equals 1 and has its hash.
        """
        q, k, v, packed = self.q, self.k, self.v, self.packed
        return (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
            q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            _spec(self.attn_mask), _spec(self.sinks), self.dropout_p, self.is_causal, self.scale,
            self.layout, self.softcap, self.return_lse, self.out_dtype, self.needs_grad,
            self.window and (self.window, *map(type, self.window)),
            packed and (
                _spec(packed.cu_seqlens_q), _spec(packed.cu_seqlens_k), packed.max_seqlen_q,
                packed.max_seqlen_k,
            ),
            self.prologue and self.prologue.form(),
        )  # fmt: skip

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return all tensors of the call; Q, K and V alone if there are no others.

        Q and K that are not made yet are none; see `QkPair.inputs`.
        """
        packed = self.packed
        if self.prologue is not None:
            return (self.v, self.attn_mask, self.sinks)
        if packed is not None:
            ends = (packed.cu_seqlens_q, packed.cu_seqlens_k)
            return (self.q, self.k, self.v, self.attn_mask, self.sinks, *ends)
        if self.attn_mask is None and self.sinks is None:
            return (self.q, self.k, self.v)
        return (self.q, self.k, self.v, self.attn_mask, self.sinks)

    def made(self) -> AttentionCall:
        """Return the call with the values of Q and K, by a pass of their own if need be."""
        if self.prologue is None:
            return self
        with without_autocast(self.v.device):
            pair = apply.joined_pair(self.prologue.q, self.prologue.k)
        q, k = (x.transpose(1, 2) if self.layout == "bhsd" else x for x in pair)
        return self._replace(q=q, k=k, prologue=None)

    def shape(self, mask_kind: str) -> CallShape:
        """Return the shape record of the call."""
        return shape_of(
            self.q, self.k, self.v, causal=self.is_causal, scale=self.factor(), layout=self.layout,
            mask_kind=mask_kind, packed=self.packed,
        )  # fmt: skip

    def host_mask(self) -> torch.Tensor | FallbackReason | None:
        """Return the mask of a host library's call as kernels take it, or why none does.

        The shapes of Q, K and V fit together.
        """
        given: object = self.attn_mask
        if given is None:
            return None
        if not isinstance(given, torch.Tensor):
            return FallbackReason(Fallback.MASK_TYPE, type(given).__name__)
        mask, seq, heads = given, *((2, 1) if self.layout == "bhsd" else (1, 2))
        if not is_plain(mask):
            return TENSOR_SUBCLASS
        if mask.device != self.q.device:
            return MASK_DEVICE
        if mask.dtype not in MASK_DTYPES:
            return FallbackReason(Fallback.MASK_DTYPE, str(mask.dtype))
        batch, keys = self.q.shape[0], self.k.shape[seq]
        if self.layout == "bshd" and mask.dim() == 2 and tuple(mask.shape) == (batch, keys):
            mask = mask[:, None, None]  # diffusers' dispatcher reads (B, Sk) as key padding
        try:
            return normalized(
                mask, batch=batch, heads_q=self.q.shape[heads], seq_q=self.q.shape[seq], seq_k=keys
            )
        except UnsupportedInputError:
            return MASK_SHAPE

    def cast(self, dtype: torch.dtype) -> AttentionCall:
        """Return the call with inputs of another dtype; fp64 stays, as it does under autocast."""
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (self.q, self.k, self.v))
        return self._replace(q=q, k=k, v=v)


def _spec(tensor: torch.Tensor | None) -> tuple[object, ...] | None:
    """Return all that is known of a tensor without its data."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is torch's own and no subclass with a behavior of its own.

    So are those with which torch itself traces a graph, as an export that is not strict does.
    """
    kind = type(tensor)
    return kind in (torch.Tensor, torch.nn.Parameter) or (
        torch.compiler.is_compiling() and kind.__module__ in TRACERS
    )


def shape_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    layout: str,
    mask_kind: str = "none",
    packed: Packed | None = None,
) -> CallShape:
    """Return the shape record of a call; its dtype is Q's, or a wider one of K or V.

    Packed tensors, with or without their one batch item in front, count as a batch of their
    sequences, each of the largest length.
    """
    widest = k if k.dtype.itemsize > q.dtype.itemsize else q
    widest = v if v.dtype.itemsize > widest.dtype.itemsize else widest
    heads, seq = (-3, -2) if layout == "bhsd" else (-2, -3)
    of_q, of_k = q.shape, k.shape
    return CallShape(
        of_q[0] if packed is None else packed.cu_seqlens_q.shape[0] - 1,
        of_q[heads],
        of_k[heads],
        of_q[seq] if packed is None or of_q[seq] == 0 else packed.max_seqlen_q,
        of_k[seq] if packed is None or of_k[seq] == 0 else packed.max_seqlen_k,
        of_q[-1],
        v.shape[-1],
        _DTYPE_NAMES.get(widest.dtype) or str(widest.dtype).removeprefix("torch."),
        causal,
        mask_kind,
        layout,
        scale,
    )
