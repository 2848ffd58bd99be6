"""Copies the chosen part of a call to host memory before the model can overwrite it."""

from __future__ import annotations

import torch

from sage_plugin.capture.call import CanonicalCall, autocast_dtype
from sage_plugin.capture.selection.heads import Part


def extract(call: CanonicalCall, part: Part) -> dict[str, torch.Tensor]:
    """The saved tensors of a call, on the CPU.

    Returns:
        `q` (b, hq, Sq, D), `k` (b, hk, Sk, D), `v` (b, hk, Sk, Dv), in the dtype that attention
        computes with; and, where there is a mask, `key_bias` (b or 1, hq or 1, Sk), fp32, 0 and
        -inf for a bool mask, or `attn_mask` (b or 1, hq or 1, Sq, Sk) as it was.
    """
    query_heads = [h * call.group + i for h in part.heads for i in range(call.group)]
    items, heads = list(part.batch), list(part.heads)
    tensors = {
        "q": _copied(call.q, items, query_heads),
        "k": _copied(call.k, items, heads),
        "v": _copied(call.v, items, heads),
    }
    if call.mask is not None:
        mask = _copied(
            call.mask,
            items if call.mask.shape[0] > 1 else [0],
            query_heads if call.mask.shape[1] > 1 else [0],
            cast=False,
        )
        if call.shape.mask_kind == "key_bias":
            tensors["key_bias"] = _as_bias(mask[:, :, 0])
        else:
            tensors["attn_mask"] = mask
    return tensors


def _copied(
    tensor: torch.Tensor, items: list[int], heads: list[int], *, cast: bool = True
) -> torch.Tensor:
    """A new contiguous CPU tensor; one batch item at a time, to bound memory on the device."""
    dtype = (autocast_dtype(tensor) if cast else None) or tensor.dtype
    # Indexing and strided copies know no FP8: the bytes do.
    raw = torch.uint8 if tensor.dtype.is_floating_point and tensor.itemsize == 1 else None
    source = tensor.view(raw) if raw is not None else tensor
    target = torch.empty(
        (len(items), len(heads), *tensor.shape[2:]), dtype=raw or dtype, device="cpu"
    )
    index = None
    if heads != list(range(tensor.shape[1])):
        index = torch.tensor(heads, device=tensor.device)
    for place, item in enumerate(items):
        rows = source[item] if index is None else source[item].index_select(0, index)
        target[place].copy_(rows)
    return target.view(dtype) if raw is not None else target


def _as_bias(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.float().contiguous()
    zero = torch.zeros(mask.shape, dtype=torch.float32, device="cpu")
    return zero.masked_fill(~mask, float("-inf"))
