"""A figure, saved as a PNG, or the sentence that says why there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sage_plugin import files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 150


def save(
    draw: Callable[[Figure], None], path: Path, *, width: float = 8.0, height: float = 5.0
) -> str:
    """Draw a figure and save it whole or not at all, on any machine: no display is needed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f"no {path.name}: plots need matplotlib, pip install 'sage-plugin[plot]'"
    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure)
    with files.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as temporary:
            figure.savefig(temporary, format="png", dpi=DOTS_PER_INCH)
    return ""
