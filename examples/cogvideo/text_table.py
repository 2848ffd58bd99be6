"""A plain text table."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns under their titles (the first row): the first one left, the others right.

    Example:
        >>> print(text_table([("kernel", "ms"), ("sdpa", "10.0")]))
        kernel    ms
        sdpa    10.0
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
