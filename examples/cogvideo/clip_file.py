"""Writing a clip to a video file: mp4 where ffmpeg is at hand, else GIF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from diffusers.utils import export_to_video
from PIL import Image

from sage_plugin.errors import OutputError, UsageError

SUFFIXES = (".mp4", ".gif")
SMALLEST_SIDE = 192
"""Smaller clips are shown enlarged by a whole factor."""


def check_output(path: Path) -> None:
    """Refuse an output file before a long run, and make its folder.

    Raises:
        UsageError: the name ends in neither `.mp4` nor `.gif`.
        OutputError: it cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--output {path}: the name must end in {' or '.join(SUFFIXES)}")
    make_folder(path.parent)
    if path.is_dir():
        raise OutputError(f"{path} is a folder: name a file")


def make_folder(path: Path) -> Path:
    """The folder, made where it is missing.

    Raises:
        OutputError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"folder {path} cannot be made: {error.strerror or error}") from error
    return path


def enlarged(frames: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """8-bit RGB frames (F, H, W, 3) for looking at, small ones enlarged.

    Args:
        frames: (F, H, W, 1 or 3) in [0, 1].
    """
    factor = max(1, -(-SMALLEST_SIDE // min(frames.shape[1:3])))
    pixels = (frames.clip(0, 1) * 255).round().astype(np.uint8).repeat(factor, 1).repeat(factor, 2)
    return np.broadcast_to(pixels, (*pixels.shape[:3], 3))


def save_clip(frames: np.ndarray[Any, Any], path: Path, fps: int) -> tuple[Path, str]:
    """Write a clip.

    Args:
        frames: (F, H, W, 1 or 3) in [0, 1].
        path: a file that `check_output` accepts.
        fps: frames per second.

    Returns:
        The file, and a sentence on why it is another one than asked for, else an empty one.
    """
    shown = enlarged(frames)
    note = "" if path.suffix == ".gif" or _has_ffmpeg() else (
        f"mp4 needs imageio-ffmpeg (pip install imageio imageio-ffmpeg): wrote a GIF, not {path}"
    )  # fmt: skip
    try:
        if path.suffix == ".gif" or note:
            path = path.with_suffix(".gif")
            save_gif([Image.fromarray(frame) for frame in shown], path, fps)
        else:
            export_to_video([Image.fromarray(f) for f in shown], str(path), fps=fps, quality=8.0)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error
    return path, note


def save_gif(images: list[Image.Image], path: Path, fps: int) -> None:
    """Write images as an endless GIF."""
    images[0].save(
        path, save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0
    )


def _has_ffmpeg() -> bool:
    try:
        import imageio  # noqa: F401
        import imageio_ffmpeg

        return bool(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError):
        return False
