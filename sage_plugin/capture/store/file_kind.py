"""What the reader of a capture folder asks of an op family: no file of it is believed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sage_plugin.capture.record import CaptureRecord

Shapes = dict[str, tuple[int, ...]]
"""Shapes of a file's tensors by name."""


@dataclass(frozen=True, slots=True)
class FileKind:
    """The checks of one op family; each returns what is wrong, or `None`.

    Attributes:
        record: its manifest lines.
        line_problem: of a line by itself.
        shape_problem: of the shapes that a file has.
        dtype_problem: of their types, once the shapes are right.
        most_tensors: tensors of a file.
        tensors: what they are, in words.
        shared_problem: of a file that several lines share, where the family has such.
    """

    record: type[CaptureRecord]
    line_problem: Callable[[Any], str | None]
    shape_problem: Callable[[Any, Shapes], str | None]
    dtype_problem: Callable[[Any, dict[str, str]], str | None]
    most_tensors: int
    tensors: str
    shared_problem: Callable[[Any, Shapes, dict[str, str]], str | None] | None = None


def wrong_tensors(found: Shapes, expected: Shapes) -> str | None:
    """Tell how shapes differ from those expected, or `None`.

    Example:
        >>> wrong_tensors({"x": (2, 8)}, {"x": (4, 8)})
        'x is (2, 8), expected (4, 8)'
    """
    if found.keys() != expected.keys():
        return f"tensors {', '.join(sorted(found))}, expected {', '.join(expected)}"
    wrong = [name for name in expected if found[name] != expected[name]]
    return f"{wrong[0]} is {found[wrong[0]]}, expected {expected[wrong[0]]}" if wrong else None
