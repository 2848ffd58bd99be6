"""How PTX writes numbers."""

from __future__ import annotations

import struct


def ptx_float(value: float) -> str:
    """A 32-bit float as a PTX constant.

    Example:
        >>> ptx_float(1.0)
        '0f3F800000'
    """
    return f"0f{struct.unpack('I', struct.pack('f', value))[0]:08X}"
