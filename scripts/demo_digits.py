"""The training data of the demo model: handwritten digits that bounce off the edges.

The glyphs are scikit-learn's bundled `load_digits` (1,797 scans of 8x8 pixels), enlarged smoothly.
Clips are drawn in batches on the glyphs' device with one `grid_sample` call, without a loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from sage_plugin.demo.sizes import BASE_PX, DemoSize
from sage_plugin.errors import DemoError

SPEED_PX = (1.0, 2.0)
"""Range of the speed in pixels per frame on a frame of `BASE_PX`; it grows with the frame."""

_CELLS = 9  # the box that moves: 8 scanned cells and half a cell of margin on each side
_FIELD_PX_PER_CELL = 8
_INK_THRESHOLD = 0.42
_RASTER = 14  # side of the compared images in cells
_NEIGHBORS = 5
_EDGE_PX = 2.2  # width of the grey rim of a stroke, in frame pixels


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Digit shapes.

    Attributes:
        fields: Smooth ink density in about [0, 1], (N, 72, 72), float32.
        labels: The digit that each field shows, (N,), int64.
    """

    fields: torch.Tensor
    labels: torch.Tensor

    def to(self, device: torch.device | str) -> Glyphs:
        """Return the same glyphs on `device`."""
        return Glyphs(self.fields.to(device), self.labels.to(device))


@dataclass(frozen=True, slots=True)
class DigitClips:
    """A batch of clips.

    Attributes:
        frames: Pixels in [-1, 1], black is -1, (B, F, 1, H, W), float32.
        labels: The digit in each clip, (B,), int64.
        corners: Top-left corner (y, x) of the digit's box in pixels, (B, F, 2), float32.
    """

    frames: torch.Tensor
    labels: torch.Tensor
    corners: torch.Tensor


def load_glyphs() -> Glyphs:
    """Load scikit-learn's bundled digits as smooth fields.

    Raises:
        DemoError: If scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DemoError(
            "the digit scans come with scikit-learn, which is not installed; "
            "run `pip install scikit-learn` (generating clips does not need it)"
        ) from error
    scans = load_digits()
    return glyphs_from_scans(torch.from_numpy(scans.images), torch.from_numpy(scans.target))


def glyphs_from_scans(scans: torch.Tensor, labels: torch.Tensor) -> Glyphs:
    """Enlarge 8x8 scans to smooth fields with half a cell of margin.

    Args:
        scans: Ink counts in [0, 16], (N, 8, 8).
        labels: Digits, (N,).
    """
    cells = functional.pad(scans.float()[:, None] / 16.0, (1, 1, 1, 1))  # (N, 1, 10, 10)
    fields = functional.interpolate(
        cells, scale_factor=_FIELD_PX_PER_CELL, mode="bicubic", align_corners=False
    )
    margin = _FIELD_PX_PER_CELL // 2
    return Glyphs(fields[:, 0, margin:-margin, margin:-margin].contiguous(), labels.long())


def most_legible(glyphs: Glyphs, *, thin: float = 0.75, typical: float = 0.6) -> Glyphs:
    """Keep the scans of each digit that people read most easily."""
    kept = []
    for digit in glyphs.labels.unique():
        members = (glyphs.labels == digit).nonzero()[:, 0]
        ink = glyphs.fields[members].mean((1, 2))
        members = members[ink.argsort()[: round(len(members) * thin)]]
        fields = glyphs.fields[members]
        distance = (fields - fields.mean(0)).flatten(1).norm(dim=1)
        kept.append(members[distance.argsort()[: round(len(members) * typical)]])
    picks = torch.cat(kept)
    return Glyphs(glyphs.fields[picks], glyphs.labels[picks])


def bounce(start: torch.Tensor, velocity: torch.Tensor, frames: int, room: float) -> torch.Tensor:
    """Positions of a point that moves at constant speed inside [0, room] and reflects at both ends.

    Args:
        start: Phase in [0, 2 * room), (B, 2); phases above `room` are on the way back.
        velocity: Pixels per frame, (B, 2).
        frames: Number of frames F.
        room: Length of the interval in pixels.

    Returns:
        Positions, (B, F, 2).
    """
    time = torch.arange(frames, device=start.device, dtype=start.dtype)
    phase = start[:, None] + velocity[:, None] * time[None, :, None]
    return room - (room - phase.remainder(2 * room)).abs()


def draw(fields: torch.Tensor, corners: torch.Tensor, size: DemoSize) -> torch.Tensor:
    """Draw one glyph per clip at sub-pixel positions.

    Args:
        fields: Smooth ink density, (B, G, G).
        corners: Top-left corner (y, x) of the box in pixels, (B, F, 2).
        size: The clip geometry.

    Returns:
        Pixels in [-1, 1], (B, F, 1, H, W).
    """
    batch, frames = corners.shape[:2]
    rows = torch.arange(size.height, device=corners.device) + 0.5
    columns = torch.arange(size.width, device=corners.device) + 0.5
    y = (rows - corners[..., 0, None]) / size.digit_px * 2 - 1  # (B, F, H), [-1, 1] inside the box
    x = (columns - corners[..., 1, None]) / size.digit_px * 2 - 1  # (B, F, W)
    shape = (batch, frames, size.height, size.width)
    grid = torch.stack((x[:, :, None, :].expand(shape), y[:, :, :, None].expand(shape)), dim=-1)
    density = functional.grid_sample(
        fields[:, None], grid.flatten(1, 2), mode="bilinear", align_corners=False
    ).view(batch, frames, 1, size.height, size.width)
    # Density ramps over about one cell: the gain narrows that ramp to _EDGE_PX pixels at any size.
    gain = size.digit_px / _CELLS / _EDGE_PX
    return ((density - _INK_THRESHOLD) * gain + 0.5).clamp(0, 1) * 2 - 1


class BouncingDigits:
    """An endless, seeded source of clips."""

    def __init__(self, glyphs: Glyphs) -> None:
        """Draw from `glyphs`, on their device."""
        self.glyphs = glyphs

    def sample(self, size: DemoSize, batch: int, *, generator: torch.Generator) -> DigitClips:
        """Draw `batch` clips with random glyphs, starts, directions and speeds.

        Example:
            >>> source = BouncingDigits(load_glyphs())
            >>> clips = source.sample(SIZES["small"], 2, generator=torch.Generator().manual_seed(0))
            >>> clips.frames.shape
            torch.Size([2, 16, 1, 48, 48])
        """
        device = self.glyphs.fields.device
        room = float(size.height - size.digit_px)
        picks = torch.randint(len(self.glyphs.labels), (batch,), generator=generator, device=device)
        start = torch.rand(batch, 2, generator=generator, device=device) * 2 * room
        angle = torch.rand(batch, generator=generator, device=device) * (torch.pi / 2)
        slow, fast = (speed * size.height / BASE_PX for speed in SPEED_PX)
        speed = slow + (fast - slow) * torch.rand(batch, generator=generator, device=device)
        # Directions need only one quadrant: the phase of `start` decides the sign on each axis.
        velocity = speed[:, None] * torch.stack((angle.sin(), angle.cos()), dim=-1)
        corners = bounce(start, velocity, size.frames, room)
        frames = draw(self.glyphs.fields[picks], corners, size)
        return DigitClips(frames, self.glyphs.labels[picks], corners)


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
