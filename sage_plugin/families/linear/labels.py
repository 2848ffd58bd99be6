"""How tables name a linear."""

from __future__ import annotations

from sage_plugin.families.attention.labels import short_dtype
from sage_plugin.schema import LinearShape


def describe(shape: LinearShape) -> str:
    """Write a shape in a few words: rows, channels in and out, and what it has.

    Example:
        >>> describe(LinearShape(4608, 3072, 12288, "bfloat16", bias=True))
        '4608x3072->12288 bf16 bias'
    """
    bias = " bias" if shape.bias else ""
    sizes = f"{shape.rows}x{shape.in_features}->{shape.out_features}"
    return f"{sizes} {short_dtype(shape.dtype)}{bias}"
