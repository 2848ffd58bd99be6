"""Reading generated digits back, by a vote of the nearest scans: a number for legibility."""

from __future__ import annotations

import torch
from torch.nn import functional

from sage_plugin.demo.digits import Glyphs, draw
from sage_plugin.demo.sizes import DemoSize

_RASTER = 14  # side of the compared images in cells
_NEIGHBORS = 5


def read_digits(frames: torch.Tensor, size: DemoSize, glyphs: Glyphs) -> torch.Tensor:
    """Return the digit that each clip shows, judged by its most similar scans.

    Each frame's ink is cut out around its centre of mass, shrunk to 14x14, and compared with every
    scan treated the same way; the five nearest scans of every frame vote.

    Args:
        frames: Pixels in [0, 1], (B, F, 1, H, W).
        size: The clips' geometry.
        glyphs: The labelled scans.

    Returns:
        Digits, (B,), int64, on the CPU.
    """
    batch, count = frames.shape[:2]
    corner = torch.zeros(len(glyphs.labels), 1, 2) + (size.height - size.digit_px) / 2
    scans = draw(glyphs.fields.cpu(), corner, size)[:, 0, 0] / 2 + 0.5  # (N, H, W)
    seen = frames[:, :, 0].float().cpu().flatten(0, 1)
    distance = torch.cdist(_cut_out(seen, size), _cut_out(scans, size))  # (B * F, N)
    nearest = distance.topk(_NEIGHBORS, largest=False).indices
    votes = functional.one_hot(glyphs.labels.cpu()[nearest], 10).sum(1)
    return votes.view(batch, count, 10).sum(1).argmax(-1)


def _cut_out(images: torch.Tensor, size: DemoSize) -> torch.Tensor:
    """Windows of the digit's size around each image's centre of mass, (N, 196)."""
    ink = images.clamp(0, 1) + 1e-6
    total = ink.sum((1, 2))
    rows = torch.arange(size.height) + 0.5
    columns = torch.arange(size.width) + 0.5
    y = (ink.sum(2) @ rows) / total
    x = (ink.sum(1) @ columns) / total
    center = torch.stack((x / size.width, y / size.height), dim=-1) * 2 - 1  # (N, 2) in [-1, 1]
    zoom = torch.tensor((size.digit_px / size.width, size.digit_px / size.height))
    theta = torch.cat((torch.diag_embed(zoom.expand(len(images), 2)), center[..., None]), dim=-1)
    target = [len(images), 1, size.digit_px, size.digit_px]
    grid = functional.affine_grid(theta, target, align_corners=False)
    window = functional.grid_sample(images[:, None], grid, align_corners=False)
    return functional.adaptive_avg_pool2d(window, _RASTER).flatten(1)
