"""Showing clips: a contact sheet (PNG) for reading, a film strip (GIF) for watching."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image


def save_clips(
    frames: torch.Tensor, path: Path, *, columns: int = 8, zoom: int = 2, frame_ms: int = 80
) -> tuple[Path, Path]:
    """Save clips as `<path>.png` (a row per clip) and `<path>.gif` (clips side by side).

    Args:
        frames: Pixels in [0, 1], (B, F, 1, H, W).
        path: Where the files go; its suffix is replaced.
        columns: Frames shown in each row of the sheet, evenly spread over the clip.
        zoom: Side in image pixels of each clip pixel.
        frame_ms: How long the film shows each frame, in milliseconds.

    Returns:
        The paths of the sheet and of the film.
    """
    gray = (frames[:, :, 0].float().cpu() * 255).round().byte()
    spread = torch.linspace(0, gray.shape[1] - 1, columns).round().long()
    sheet = gray[:, spread].permute(0, 2, 1, 3).flatten(2, 3).flatten(0, 1)  # (B * H, columns * W)
    strip = gray.permute(1, 2, 0, 3).flatten(2, 3)  # (F, H, B * W)
    path.parent.mkdir(parents=True, exist_ok=True)
    png, gif = path.with_suffix(".png"), path.with_suffix(".gif")
    _image(sheet, zoom).save(png)
    film = [_image(frame, zoom) for frame in strip]
    film[0].save(gif, save_all=True, append_images=film[1:], duration=frame_ms, loop=0)
    return png, gif


def _image(gray: torch.Tensor, zoom: int) -> Image.Image:
    """Bytes (H, W) as an image, each pixel `zoom` times larger."""
    return Image.fromarray(gray.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1).numpy())
