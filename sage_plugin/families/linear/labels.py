"""How tables name a linear."""

from __future__ import annotations

from sage_plugin.families.attention.labels import short_dtype
from sage_plugin.schema import LinearKey, LinearShape


def describe(shape: LinearShape) -> str:
    """Write a shape in a few words: rows, channels in and out, and what it has.

    Example:
        >>> describe(LinearShape(4608, 3072, 12288, "bfloat16", bias=True))
        '4608x3072->12288 bf16 bias'
    """
    bias = " bias" if shape.bias else ""
    sizes = f"{shape.rows}x{shape.in_features}->{shape.out_features}"
    return f"{sizes} {short_dtype(shape.dtype)}{bias}"


def describe_key(key: LinearKey) -> str:
    """Write a key in a few words: kernel, rows, channels in and out, dtype."""
    sizes = f"{key.rows}x{key.in_features}->{key.out_features}"
    return f"{key.kernel}:{key.variant} {sizes} {short_dtype(key.dtype)}"


def lines(call: LinearShape | LinearKey) -> str:
    """Write a call's sizes on three short lines, the same way for a shape and for a key.

    Example:
        >>> lines(LinearShape(4608, 3072, 12288, "bfloat16")).splitlines()
        ['3,072->12,288', '4,608 rows', 'bf16']
    """
    features = f"{call.in_features:,}->{call.out_features:,}"
    return f"{features}\n{call.rows:,} rows\n{short_dtype(call.dtype)}"
