"""The arguments of one attention call of a patched layer, and its mask as kernels take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention.mask import MASK_DTYPES, mask_kind, normalized
from sage_plugin.kernels.attention.runtime import shape_of
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.schema import CallShape

SUBCLASS = FallbackReason(Fallback.TENSOR_SUBCLASS)
MASK_SHAPE = FallbackReason(Fallback.MASK_SHAPE)
MASK_DEVICE = FallbackReason(Fallback.MASK_DEVICE)


def plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is torch's own and no subclass with a behaviour."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)  # no slots: traced code makes one
class Call:
    """The arguments of one attention call, in the words of SDPA.

    Attributes:
        softcap: bound of the scores, 0 for none; SDPA knows none.
        sinks: one more logit a query head, likewise.
        return_lse: the LSE is wanted too, of parts of a call that are merged by it.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    attn_mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    layout: str
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    return_lse: bool = False

    def factor(self) -> float:
        """The factor of the scores before softmax."""
        return float(max(1, self.q.shape[3]) ** -0.5) if self.scale is None else self.scale

    def shape(self, mask: torch.Tensor | None) -> CallShape:
        """The shape record of the call with its mask as kernels take it."""
        return shape_of(
            self.q, self.k, self.v, causal=self.is_causal, scale=self.factor(), layout=self.layout,
            mask_kind=mask_kind(mask),
        )  # fmt: skip

    def mask(self) -> torch.Tensor | FallbackReason | None:
        """The mask as kernels take it, or why none does; the shapes of Q, K and V fit."""
        given: object = self.attn_mask
        if given is None:
            return None
        if not isinstance(given, torch.Tensor):
            return FallbackReason(Fallback.MASK_TYPE, type(given).__name__)
        mask, seq, heads = given, *((2, 1) if self.layout == "bhsd" else (1, 2))
        if not plain(mask):
            return SUBCLASS
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

    def cast(self, dtype: torch.dtype) -> Call:
        """The call with its inputs in another dtype; fp64 stays, as it does under autocast."""
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (self.q, self.k, self.v))
        return Call(
            q, k, v, self.attn_mask, self.dropout_p, self.is_causal, self.scale, self.enable_gqa,
            self.layout, self.softcap, self.sinks, self.return_lse,
        )  # fmt: skip
