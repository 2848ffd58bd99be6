"""The op families: what capture, tune, bench and the command line may ask of each one.

A family is a folder of kernels, a room here, and one entry. Tools know families only through the
entry, so that a new one brings its rooms and its row, and no tool changes.
"""

from __future__ import annotations

from sage_plugin.errors import UsageError
from sage_plugin.families.attention.entry import ATTENTION
from sage_plugin.families.family import Family

__all__ = ["ATTENTION", "Family", "family"]

_FAMILIES = {entry.name: entry for entry in (ATTENTION,)}


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
