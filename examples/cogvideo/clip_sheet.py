"""Clips beside each other: a contact sheet to read (PNG) and a film to watch (GIF)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from clip_file import enlarged, save_gif
from PIL import Image, ImageDraw, ImageFont

Clips = Mapping[str, np.ndarray[Any, Any]]

GAP, TITLE_HEIGHT, FONT_SIZE = 6, 22, 14
DIFFERENCE_GAIN = 10
LARGEST_CELL = 360
INK, PAPER = (20, 20, 20), (255, 255, 255)


def with_differences(clips: Clips, reference: str) -> dict[str, np.ndarray[Any, Any]]:
    """The clips, each but the reference followed by its amplified difference from the reference."""
    result: dict[str, np.ndarray[Any, Any]] = {}
    for name, frames in clips.items():
        result[name] = frames
        if name != reference:
            gap = np.abs(frames - clips[reference]) * DIFFERENCE_GAIN
            result[f"{name}: difference x{DIFFERENCE_GAIN}"] = gap
    return result


def save_sheet(clips: Clips, path: Path, *, columns: int = 6) -> None:
    """A titled row a clip, with frames spread evenly over it."""
    picks = {}
    for name, frames in clips.items():
        spread = np.linspace(0, len(frames) - 1, min(columns, len(frames))).round().astype(int)
        picks[name] = _cells(frames[spread])
    cell = next(iter(picks.values()))[0]
    columns = len(next(iter(picks.values())))
    row_height = TITLE_HEIGHT + cell.height + GAP
    sheet = Image.new(
        "RGB", (GAP + columns * (cell.width + GAP), GAP + len(picks) * row_height), PAPER
    )
    for row, (name, images) in enumerate(picks.items()):
        top = GAP + row * row_height
        _title(sheet, name, GAP, top)
        for column, image in enumerate(images):
            sheet.paste(image, (GAP + column * (cell.width + GAP), top + TITLE_HEIGHT))
    sheet.save(path)


def save_film(clips: Clips, path: Path, fps: int) -> None:
    """All clips side by side under their titles."""
    cells = {name: _cells(frames) for name, frames in clips.items()}
    width, height = next(iter(cells.values()))[0].size
    films = []
    for images in zip(*cells.values(), strict=True):
        film = Image.new(
            "RGB", (GAP + len(cells) * (width + GAP), TITLE_HEIGHT + height + 2 * GAP), PAPER
        )
        for column, (name, image) in enumerate(zip(cells, images, strict=True)):
            left = GAP + column * (width + GAP)
            _title(film, name, left, GAP)
            film.paste(image, (left, GAP + TITLE_HEIGHT))
        films.append(film)
    save_gif(films, path, fps)


def _cells(frames: np.ndarray[Any, Any]) -> Sequence[Image.Image]:
    """Frames as images that fit beside each other."""
    images = [Image.fromarray(frame) for frame in enlarged(frames)]
    for image in images:
        image.thumbnail((LARGEST_CELL, LARGEST_CELL))
    return images


def _title(image: Image.Image, text: str, left: int, top: int) -> None:
    draw = ImageDraw.Draw(image)
    draw.text((left, top), text, fill=INK, font=ImageFont.load_default(FONT_SIZE))
