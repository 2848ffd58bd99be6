"""One attention call in canonical form: `(B, H, S, D)` views, unexpanded K and V, mask by kind."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sage_plugin.kernels.attention.mask import mask_kind
from sage_plugin.kernels.contract import bhsd
from sage_plugin.kernels.fallback import Fallback
from sage_plugin.plugin.context import CallEvent
from sage_plugin.schema import CallShape

UNTOLD = (Fallback.PACKED_BY_HOST, Fallback.WINDOW_BY_HOST)
"""Why a call is another than its tensors and its mask tell."""


@dataclass(frozen=True, slots=True)
class CanonicalCall:
    """Views of the tensors of one call; nothing is copied yet.

    Attributes:
        q: (B, Hq, Sq, D).
        k: (B, Hk, Sk, D).
        v: (B, Hk, Sk, Dv).
        mask: the mask as (B or 1, Hq or 1, Sq or 1, Sk), one entry where one was expanded (stride
            0) as kernels see it, or `None`.
        shape: the full call.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    shape: CallShape

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.shape.heads_q // self.shape.heads_k


def canonical(event: CallEvent) -> CanonicalCall | str:
    """The call in canonical form, or the reason why it cannot be recorded.

    K and V whose heads are one head expanded (stride 0) come back as that one head.
    Sequences that are packed without a mask are attention of each, and a window without one hides
    keys, which tensors alone do not tell.
    """
    if event.blocked is not None and event.blocked.cause in UNTOLD:
        return str(event.blocked)
    tensors = (event.q, event.k, event.v)
    if any(type(t) not in (torch.Tensor, torch.nn.Parameter) for t in tensors):
        return "tensor subclass"
    if any(t.dim() != 4 for t in tensors) or event.q.device.type == "meta":
        return "not three 4-D tensors with data"
    q, k, v = (bhsd(t.detach(), event.layout) for t in tensors)
    if k.shape[1] > 1 and k.stride(1) == 0 and v.stride(1) == 0:
        k, v = k[:, :1], v[:, :1]
    if not _fit(q, k, v):
        return "shapes of Q, K and V do not form attention"
    mask = None
    if event.attn_mask is not None:
        mask = _four_dim_mask(event.attn_mask, q, k, event.layout)
        if mask is None:
            return "mask that does not broadcast to (B, H, Sq, Sk)"
    return CanonicalCall(q, k, v, mask, _shape(event, q, k, v, mask))


def _fit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    return (
        0 not in (*q.shape, *k.shape, *v.shape)
        and q.shape[0] == k.shape[0] == v.shape[0]
        and k.shape[1:3] == v.shape[1:3]
        and q.shape[1] % k.shape[1] == 0
        and q.shape[3] == k.shape[3]
    )


def _four_dim_mask(
    mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, layout: str
) -> torch.Tensor | None:
    """The mask with four dims that broadcast to (B, Hq, Sq, Sk), or `None`."""
    if not isinstance(mask, torch.Tensor) or not 2 <= mask.dim() <= 4:
        return None
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if mask.dim() == 2 and layout == "bshd" and mask.shape == (full[0], full[3]):
        mask = mask[:, None, None]  # diffusers' dispatcher reads (B, Sk) as key padding
    while mask.dim() < 4:
        mask = mask[None]
    fits = all(have in (1, want) for have, want in zip(mask.shape, full, strict=True))
    if not fits:
        return None
    for dim in range(3):
        if mask.shape[dim] > 1 and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask.detach().expand(*mask.shape[:3], full[3])


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts an input of SDPA, `None` where it does not."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def _shape(
    event: CallEvent, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> CallShape:
    return CallShape(
        batch=q.shape[0],
        heads_q=q.shape[1],
        heads_k=k.shape[1],
        seq_q=q.shape[2],
        seq_k=k.shape[2],
        head_dim=q.shape[3],
        dv=v.shape[3],
        dtype=str(autocast_dtype(event.q) or q.dtype).removeprefix("torch."),
        causal=bool(event.is_causal),
        mask_kind=mask_kind(mask),
        layout=event.layout,
        scale=float(q.shape[3] ** -0.5 if event.scale is None else event.scale),
    )
