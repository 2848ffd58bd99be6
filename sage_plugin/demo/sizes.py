"""The two clip geometries that one set of weights serves, and their token counts."""

from __future__ import annotations

from dataclasses import dataclass

from sage_plugin.errors import DemoError

PATCH_PX = 4
"""Side of a square patch in pixels; one patch of one frame is one token."""
TEXT_TOKENS = 8
"""Length of the label's token sequence, which stands where a prompt's tokens stand."""
BASE_PX = 48
"""Side of the smallest frame in pixels: the unit that speeds and rotary positions refer to."""


@dataclass(frozen=True, slots=True)
class DemoSize:
    """One clip geometry.

    Attributes:
        name: The word used on the command line.
        frames: Number of frames.
        height: Frame height in pixels, a multiple of `PATCH_PX`.
        width: Frame width in pixels, a multiple of `PATCH_PX`.
        digit_px: Side of the square box that holds the digit, in pixels.
        shift: Time shift of the noise schedule: `t -> shift * t / (1 + (shift - 1) * t)`. At larger
            sizes more pixels share the same content, so more noise is needed to hide it.
        default_steps: Denoising steps when the caller names none.
    """

    name: str
    frames: int
    height: int
    width: int
    digit_px: int
    shift: float
    default_steps: int = 15

    @property
    def scale(self) -> int:
        """How many times finer than the smallest frame this one is."""
        return self.height // BASE_PX

    @property
    def grid(self) -> tuple[int, int]:
        """Patches per frame, (rows, columns)."""
        return self.height // PATCH_PX, self.width // PATCH_PX

    @property
    def video_tokens(self) -> int:
        """Number of video tokens in one clip."""
        rows, columns = self.grid
        return self.frames * rows * columns

    @property
    def tokens(self) -> int:
        """Sequence length that attention sees: label tokens first, then video tokens."""
        return TEXT_TOKENS + self.video_tokens


SIZES: dict[str, DemoSize] = {
    "small": DemoSize("small", frames=16, height=48, width=48, digit_px=28, shift=4.0),
    "large": DemoSize("large", frames=32, height=96, width=96, digit_px=56, shift=8.0),
}
"""The sizes that the shipped weights were trained for, by name."""


def find_size(size: str | DemoSize) -> DemoSize:
    """Return the geometry that `size` names (a `DemoSize` is returned as it is)."""
    if isinstance(size, DemoSize):
        return size
    if size not in SIZES:
        raise DemoError(f"unknown demo size {size!r}; pass one of {', '.join(SIZES)}")
    return SIZES[size]
