"""An argument that may be one name or several."""

from __future__ import annotations

from collections.abc import Iterable


def texts(given: object) -> tuple[str, ...] | None:
    """Return the names of an argument that is one or several, `None` of anything else.

    Example:
        >>> texts("unet"), texts(["a", "b"]), texts(3), texts([3])
        (('unet',), ('a', 'b'), None, None)
    """
    if isinstance(given, str):
        return (given,)
    names = tuple(given) if isinstance(given, Iterable) else (given,)
    return names if all(isinstance(name, str) for name in names) else None
