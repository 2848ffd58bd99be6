"""How tables name a call of paged attention."""

from __future__ import annotations

from sage_plugin.kernels.call_words import short_dtype
from sage_plugin.paged_records import PagedKey, PagedShape

SHORT = {"float8_e4m3fn": "fp8", "float8_e4m3fnuz": "fp8"}


def describe(shape: PagedShape) -> str:
    """Write a shape in a few words: kind, rows and keys, sequences, heads, cache and page.

    Example:
        >>> describe(PagedShape((1, 1), (512, 512), 32, 8, 128, "bfloat16", "int8", 64, 512))
        'decode 2 of 1,024 keys, 2 sequences, 32/8x128 int8 pages of 64'
    """
    heads = f"{shape.heads_q}/{shape.heads_k}x{shape.head_dim}"
    pages = f"{_cache(shape.cache_dtype)} pages of {shape.page_size}"
    return (
        f"{shape.kind} {shape.tokens:,} of {sum(shape.kv_lens):,} keys, "
        f"{len(shape.q_lens)} sequences, {heads} {pages}"
    )


def describe_key(key: PagedKey) -> str:
    """Write a key in a few words: kernel, kind, rows, keys, heads, cache and page."""
    return (
        f"{key.kernel}:{key.variant} {key.kind} {key.tokens}x{key.max_keys} "
        f"{key.gqa_ratio}:1x{key.head_dim} {_cache(key.cache_dtype)} pages of {key.page_size}"
    )


def lines(call: PagedShape | PagedKey) -> str:
    """Write a call's sizes on three short lines, the same way for a shape and for a key.

    Example:
        >>> shape = PagedShape((1, 1), (512, 512), 32, 8, 128, "bfloat16", "int8", 64, 512)
        >>> lines(shape).splitlines()
        ['decode 2', 'up to 512 keys', 'int8 pages of 64']
    """
    pages = f"{_cache(call.cache_dtype)} pages of {call.page_size}"
    return f"{call.kind} {call.tokens:,}\nup to {call.max_keys:,} keys\n{pages}"


def _cache(dtype: str) -> str:
    return SHORT.get(dtype) or ("int8" if dtype == "int8" else short_dtype(dtype))
