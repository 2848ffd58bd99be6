"""Writing new keys and values to the pages of their sequences, quantized where the cache is."""

from __future__ import annotations

from itertools import pairwise

import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.paged_attention.call import PagedCall
from sage_plugin.kernels.paged_attention.validate import EIGHT_BITS, checked_call, largest_of
from sage_plugin.kernels.quantize.emulation import round_to
from sage_plugin.kernels.surroundings import on_device

__all__ = ["append_pages"]

MOST_GROWTH = 2.0**100
"""Of a scale at once; what a page held is nothing beside what grows it more."""


def append_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_q_lens: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Write the keys and values of new tokens to the caches, in place, before attention reads them.

    The rows of sequence b become the last of its `kv_lens[b]` keys. In 8-bit caches a page's scale
    of a head is that of its largest magnitude so far: as a larger one comes, the page is written
    anew. In FP8 a scale grows by powers of two, by which numbers are divided without loss. It is
    NaN once a key or value of its page was not finite. A page begins anew with its first slot. One
    that the table does not have is left out. On a GPU no integer is read on the CPU.

    Args:
        k: `(T, Hk, D)`, new keys; channels side by side.
        v: likewise, values.
        k_cache: as in `paged_attention`; v_cache, page_table, kv_lens and cu_q_lens too.
        v_cache: values.
        page_table: pages of each sequence.
        kv_lens: keys of each sequence, the new ones among them.
        cu_q_lens: where the rows of each sequence begin.
        k_scale: `(pages, Hk)` float32, written too; required for 8-bit caches.
        v_scale: likewise, of values.
        backend: `"auto"`, `"triton"` or `"emulation"`, which reads the integers.

    Raises:
        UnsupportedInputError: arguments that do not fit together.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 4, 16, 1, 8)
        >>> table, lens = torch.tensor([[2]]), torch.tensor([3])
        >>> new = torch.ones(3, 1, 8)
        >>> append_pages(new, new, k_cache, v_cache, table, lens, torch.tensor([0, 3]))
        >>> k_cache[2].sum().item()
        24.0
    """
    call = PagedCall(k, k_cache, v_cache, page_table, kv_lens, cu_q_lens, None, k_scale, v_scale)
    checked_call(call)
    if v.shape != k.shape or k.shape[1] != k_cache.shape[2] or max(k.stride(2), v.stride(2)) > 1:
        raise UnsupportedInputError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} need to be (tokens, {k_cache.shape[2]} key "
            "heads, D), channels side by side"
        )
    if k_cache.dtype in EIGHT_BITS and (k_scale is None or v_scale is None):
        raise UnsupportedInputError("k_scale or v_scale is missing; 8-bit caches need both here")
    if k.numel() == 0:
        return
    if backend == "emulation" or (backend == "auto" and k.device.type == "cpu"):
        _append_emulated(k, v, call)
        return
    from sage_plugin.kernels.paged_attention.backends.triton.append import append_triton

    with on_device(k.device):
        append_triton(k, v, call)


def _append_emulated(k: torch.Tensor, v: torch.Tensor, call: PagedCall) -> None:
    pages, size = call.k_cache.shape[:2]
    ends, lens = call.cu_q_lens.tolist(), call.kv_lens.tolist()
    for s, (first, end) in enumerate(pairwise(ends)):
        at = lens[s] - (end - first)
        while first < end:
            number, slot = int(call.page_table[s, at // size]), at % size
            count = min(size - slot, end - first)
            if 0 <= number < pages:
                for new, cache, scale in (
                    (k, call.k_cache, call.k_scale), (v, call.v_cache, call.v_scale),
                ):  # fmt: skip
                    of_page = None if scale is None else scale[number]
                    _write(new[first : first + count], cache[number], of_page, slot)
            first, at = first + count, at + count


def _write(new: torch.Tensor, page: torch.Tensor, scale: torch.Tensor | None, slot: int) -> None:
    """Write rows `(n, Hk, D)` to a page from a slot on, `scale` being that of each head."""
    rows = page[slot : slot + len(new)]
    if scale is None:
        rows.copy_(new)
        return
    wide, before = new.float(), scale.clone() if slot else torch.zeros_like(scale)
    limit = largest_of(page.dtype)
    scale.copy_(_grown(before, wide.abs().amax((0, 2)) / limit, page.dtype))
    unit = torch.where(scale > 0, scale, 1.0)[:, None]
    larger = (scale > before)[None, :, None]
    held = page[:slot]
    anew = _rounded(held.float() * before[:, None] / unit, page.dtype, limit)
    held.copy_(torch.where(larger, anew.float(), held.float()).to(page.dtype))
    rows.copy_(_rounded(wide / unit, page.dtype, limit))


def _grown(before: torch.Tensor, least: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A scale of at least so much, NaN where that is not finite."""
    least = least.masked_fill(~least.isfinite(), torch.nan)
    if dtype != torch.int8:
        growth = least / before
        mantissa, exponent = torch.frexp(growth)
        power = torch.ldexp(before, exponent - (mantissa == 0.5).int())
        least = torch.where((growth > 1) & (growth < MOST_GROWTH), power, least)
    return torch.maximum(least, before)


def _rounded(wide: torch.Tensor, dtype: torch.dtype, limit: float) -> torch.Tensor:
    wide = wide.clamp(-limit, limit)
    return wide.round().to(dtype) if dtype == torch.int8 else round_to(wide, dtype)
