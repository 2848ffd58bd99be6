"""Clips beside each other: a contact sheet to read (PNG) and a film to watch (GIF)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sage_plugin import files

Clips = Mapping[str, np.ndarray[Any, Any]]
"""Frames (F, H, W, 1 or 3) in [0, 1] by title."""

GAP, TITLE_HEIGHT, FONT_SIZE = 6, 22, 14
DIFFERENCE_GAIN = 10
SHEET_SIDE, FILM_SIDE, LARGEST_SIDE = 96, 256, 360
"""Of a shown frame in pixels: smaller ones are enlarged by a whole factor, larger ones shrunk."""

INK, PAPER = (20, 20, 20), (255, 255, 255)


def save_comparison(clips: Clips, path: Path, *, fps: int = 12) -> tuple[Path, Path]:
    """Save clips beside the first of them, each also as its difference from it, tenfold."""
    baseline = next(iter(clips))
    shown: dict[str, np.ndarray[Any, Any]] = {}
    for name, frames in clips.items():
        shown[name] = frames
        if name != baseline:
            gap = np.abs(frames - clips[baseline]) * DIFFERENCE_GAIN
            title = f"difference x{DIFFERENCE_GAIN}"
            shown[title if len(clips) == 2 else f"{name}: {title}"] = gap
    return save_clips(shown, path, fps=fps)


def save_clips(clips: Clips, path: Path, *, columns: int = 8, fps: int = 12) -> tuple[Path, Path]:
    """Save `<path>.png`, a row of frames per clip, and `<path>.gif`, the clips side by side.

    Args:
        clips: the clips, all of one length and size.
        path: where the files go; its suffix is replaced.
        columns: frames in each row of the sheet, evenly spread over the clip.
        fps: frames per second of the film.

    Returns:
        The paths of the sheet and of the film.
    """
    count = len(next(iter(clips.values())))
    spread = np.linspace(0, count - 1, min(columns, count)).round().astype(int)
    sheet = _stacked([_row({n: list(_images(c[spread], SHEET_SIDE))}) for n, c in clips.items()])
    large = {name: list(_images(frames, FILM_SIDE)) for name, frames in clips.items()}
    film = [_row({n: [cells[i]] for n, cells in large.items()}) for i in range(count)]
    png, gif = path.with_suffix(".png"), path.with_suffix(".gif")
    with files.writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(png)
        film[0].save(gif, save_all=True, append_images=film[1:], duration=1000 // fps, loop=0)
    return png, gif


def _images(frames: np.ndarray[Any, Any], smallest_side: int) -> Iterator[Image.Image]:
    factor = max(1, -(-smallest_side // min(frames.shape[1:3])))
    pixels = (frames.clip(0, 1) * 255).round().astype(np.uint8).repeat(factor, 1).repeat(factor, 2)
    for frame in np.broadcast_to(pixels, (*pixels.shape[:3], 3)):
        image = Image.fromarray(frame)
        image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
        yield image


def _row(cells: Mapping[str, list[Image.Image]]) -> Image.Image:
    """Images in a row, under the title of each group."""
    images = [image for group in cells.values() for image in group]
    width, height = images[0].size
    row = Image.new("RGB", (len(images) * (width + GAP), TITLE_HEIGHT + height), PAPER)
    draw, left = ImageDraw.Draw(row), 0
    for title, group in cells.items():
        draw.text((left, 0), title, fill=INK, font=ImageFont.load_default(FONT_SIZE))
        for image in group:
            row.paste(image, (left, TITLE_HEIGHT))
            left += width + GAP
    return row


def _stacked(rows: list[Image.Image]) -> Image.Image:
    sheet = Image.new("RGB", (rows[0].width, sum(row.height for row in rows)), PAPER)
    for number, row in enumerate(rows):
        sheet.paste(row, (0, number * row.height))
    return sheet
