"""How tables name a linear."""

from __future__ import annotations

from sage_plugin.kernels.call_words import short_dtype
from sage_plugin.schema import LinearKey, LinearShape


def describe(shape: LinearShape) -> str:
    """Write a shape in a few words: rows, channels in and out, groups, and what it has.

    Example:
        >>> describe(LinearShape(4608, 3072, 12288, "bfloat16", bias=True))
        '4608x3072->12288 bf16 bias'
    """
    bias = " bias" if shape.bias else ""
    return f"{_sizes(shape)} {short_dtype(shape.dtype)}{bias}"


def describe_key(key: LinearKey) -> str:
    """Write a key in a few words: kernel, rows, channels in and out, dtype."""
    return f"{key.kernel}:{key.variant} {_sizes(key)} {short_dtype(key.dtype)}"


def lines(call: LinearShape | LinearKey) -> str:
    """Write a call's sizes on three short lines, the same way for a shape and for a key.

    Example:
        >>> lines(LinearShape(4608, 3072, 12288, "bfloat16")).splitlines()
        ['3,072->12,288', '4,608 rows', 'bf16']
    """
    features = f"{call.in_features:,}->{call.out_features:,}"
    groups = f", {call.groups} groups" if call.groups else ""
    return f"{features}\n{call.rows:,} rows{groups}\n{short_dtype(call.dtype)}"


def _sizes(call: LinearShape | LinearKey) -> str:
    groups = f" in {call.groups} groups" if call.groups else ""
    return f"{call.rows}x{call.in_features}->{call.out_features}{groups}"
