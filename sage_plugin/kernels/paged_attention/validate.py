"""What paged attention refuses before anything runs: what was got, what is allowed, what to do."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention import validate
from sage_plugin.kernels.paged_attention.call import PagedCall

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
EIGHT_BITS = (torch.int8, *FP8)
INTEGERS = (torch.int32, torch.int64)
LARGEST_HEAD_DIM = 256
LARGEST_GROUP = 128


def largest_of(cache: torch.dtype) -> float:
    """Return the largest value of an 8-bit type.

    Example:
        >>> largest_of(torch.int8)
        127.0
    """
    return 127.0 if cache == torch.int8 else float(torch.finfo(cache).max)


class PagedNumbers(NamedTuple):
    """The numbers of a call as kernels take them.

    Attributes:
        scale: factor of the scores.
        left: keys before its own position that a row sees, -1 for all; right likewise after it.
        right: 0 if the call is causal.
        softcap: 0 for none.
    """

    scale: float
    left: int
    right: int
    softcap: float


def checked_call(call: PagedCall) -> PagedNumbers:
    """Return the numbers of a call whose tensors fit together.

    Raises:
        UnsupportedInputError: naming the argument that does not fit.
    """
    check_tensors(call)
    _check_shapes(call)
    _check_integers(call)
    _check_dtypes(call)
    _check_scales(call)
    if call.needs_grad:
        raise UnsupportedInputError(
            "paged attention has no backward and an input requires a gradient; call it under "
            "torch.no_grad()"
        )
    window, softcap, scale = validate.checked_rest(
        call.q, "bshd", call.window, call.softcap, call.scale, call.sinks
    )
    return PagedNumbers(scale, window[0], 0 if call.is_causal else window[1], softcap)


def check_tensors(call: PagedCall) -> None:
    """Raise unless what has to be a tensor is one, all on one device.

    Raises:
        UnsupportedInputError: naming the argument that is not.
    """
    for name, given in zip(PagedCall._fields[:9], call.tensors(), strict=True):
        optional = name in ("sinks", "k_scale", "v_scale")
        if not isinstance(given, torch.Tensor) and not (optional and given is None):
            raise UnsupportedInputError(f"{name} is {type(given).__name__}; give a torch.Tensor")
        if given is not None and given.device != call.q.device:
            raise UnsupportedInputError(
                f"{name} is on {given.device} and q on {call.q.device}; move them to one device"
            )


def _check_shapes(call: PagedCall) -> None:
    q, k, v = call.q, call.k_cache, call.v_cache
    if q.dim() != 3 or k.dim() != 4 or k.shape != v.shape or q.shape[2] != k.shape[3]:
        raise UnsupportedInputError(
            f"q {tuple(q.shape)}, k_cache {tuple(k.shape)} and v_cache {tuple(v.shape)} do not fit "
            "together; they need to be (tokens, query heads, D) and, both caches, "
            "(pages, page size, key heads, D)"
        )
    validate.check_heads(q.shape[1], k.shape[2])
    if not 1 <= q.shape[2] <= LARGEST_HEAD_DIM:
        raise UnsupportedInputError(f"head dim {q.shape[2]} is not between 1 and 256")
    if k.shape[1] == 0:
        raise UnsupportedInputError("k_cache has pages of 0 tokens; it needs at least 1")
    if call.group > LARGEST_GROUP:
        raise UnsupportedInputError(
            f"{call.group} query heads share a key head; paged attention takes up to "
            f"{LARGEST_GROUP}"
        )
    for name, cache in (("k_cache", k), ("v_cache", v)):
        if cache.stride(3) != 1 and cache.shape[3] != 1:
            raise UnsupportedInputError(
                f"{name} has a stride of {cache.stride(3)} between channels; it needs channels "
                "side by side"
            )


def _check_integers(call: PagedCall) -> None:
    table, lens, ends = call.page_table, call.kv_lens, call.cu_q_lens
    for name, given, dims in (
        ("page_table", table, 2),
        ("kv_lens", lens, 1),
        ("cu_q_lens", ends, 1),
    ):
        if given.dtype not in INTEGERS or given.dim() != dims:
            raise UnsupportedInputError(
                f"{name} is {given.dtype} {tuple(given.shape)}; it needs int32 or int64 of {dims} "
                f"dimension{'s' if dims > 1 else ''}"
            )
        if dims == 1 and not given.is_contiguous():
            raise UnsupportedInputError(f"{name} is strided; call .contiguous() on it")
    if not table.shape[0] == lens.shape[0] == ends.shape[0] - 1:
        raise UnsupportedInputError(
            f"page_table {tuple(table.shape)}, kv_lens {tuple(lens.shape)} and cu_q_lens "
            f"{tuple(ends.shape)} do not fit together; for B sequences they need to be "
            "(B, pages), (B,) and (B + 1,)"
        )


def _check_dtypes(call: PagedCall) -> None:
    q, k, v = call.q.dtype, call.k_cache.dtype, call.v_cache.dtype
    if q not in FLOATS:
        raise UnsupportedInputError(f"q is {q}; it needs float16, bfloat16 or float32")
    if k != v or k not in (q, *EIGHT_BITS):
        raise UnsupportedInputError(
            f"k_cache is {k} and v_cache {v}; both need q's dtype {q}, int8 or float8_e4m3fn"
        )


def _check_scales(call: PagedCall) -> None:
    cache = call.k_cache
    for name, given in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
        if given is None:
            if cache.dtype == torch.int8:
                raise UnsupportedInputError(
                    f"{name} is missing; int8 caches need one float32 for each page and key head"
                )
            continue
        if cache.dtype not in EIGHT_BITS:
            raise UnsupportedInputError(
                f"{name} is given and the caches are {cache.dtype}; only 8-bit ones have scales"
            )
        needed = (cache.shape[0], cache.shape[2])
        if given.dtype != torch.float32 or tuple(given.shape) != needed:
            raise UnsupportedInputError(
                f"{name} is {given.dtype} {tuple(given.shape)}; it needs float32 {needed}, one "
                "for each page and key head"
            )
