"""What paged attention costs: floating-point operations, and bytes that must move."""

from __future__ import annotations

from sage_plugin.kernels.paged_attention.launch_space import BYTES
from sage_plugin.paged_records import PagedShape


def flops(shape: PagedShape) -> int:
    """Count multiplications and additions of the two products, of keys that causality shows.

    Example:
        >>> flops(PagedShape((1, 2), (5, 2), 4, 2, 8, "bfloat16", "int8", 16, 16))
        1024
    """
    seen = sum(
        max(0, keys - rows + 1 + token)
        for rows, keys in zip(shape.q_lens, shape.kv_lens, strict=True)
        for token in range(rows)
    )
    return 4 * shape.heads_q * shape.head_dim * seen


def moved_bytes(shape: PagedShape) -> int:
    """Count the bytes that a call moves at least: keys and values once, Q and the output.

    Example:
        >>> moved_bytes(PagedShape((1,), (64,), 4, 2, 8, "bfloat16", "int8", 16, 64))
        2176
    """
    keys = 2 * sum(shape.kv_lens) * shape.heads_k * BYTES.get(shape.cache_dtype, 1)
    rows = 2 * shape.tokens * shape.heads_q * BYTES[shape.dtype]
    return (keys + rows) * shape.head_dim
