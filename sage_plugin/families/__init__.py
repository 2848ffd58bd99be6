"""The op families: what capture, tune, bench and the command line may ask of each one.

A family is a folder of kernels, a room here, and one entry. Tools know families only through the
entry, so that a new one brings its rooms and its row, and no tool changes.
"""

from __future__ import annotations

from sage_plugin.errors import UsageError
from sage_plugin.families.attention.entry import ATTENTION
from sage_plugin.families.family import Family
from sage_plugin.families.grouped_linear.entry import GROUPED_LINEAR_FAMILY
from sage_plugin.families.linear.entry import LINEAR_FAMILY
from sage_plugin.families.paged_attention.entry import PAGED_FAMILY
from sage_plugin.schema import AnyKey, AnyShape

__all__ = ["ATTENTION", "LINEAR_FAMILY", "Family", "describe", "describe_key", "family"]

_FAMILIES = {
    entry.name: entry for entry in (ATTENTION, LINEAR_FAMILY, GROUPED_LINEAR_FAMILY, PAGED_FAMILY)
}


def family(name: str) -> Family:
    """Return the family of a name.

    Raises:
        UsageError: there is none.

    Example:
        >>> family("attention").parse_kernel("qk_int8")
        ('sage', 'auto')
    """
    if name not in _FAMILIES:
        raise UsageError(f"op family {name!r} is not known: choose one of {', '.join(_FAMILIES)}")
    return _FAMILIES[name]


def describe_key(key: AnyKey) -> str:
    """Write the key of a call of any family in a few words."""
    return family(key.family).describe_key(key)


def describe(shape: AnyShape) -> str:
    """Write the shape of a call of any family in a few words.

    Example:
        >>> from sage_plugin.schema import LinearShape
        >>> describe(LinearShape(8, 64, 32, "bfloat16"))
        '8x64->32 bf16'
    """
    return family(shape.family).describe(shape)
