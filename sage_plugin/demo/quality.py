"""How far a clip is from its reference, frame by frame."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from sage_plugin.errors import DeviceError
from sage_plugin.schema import JsonRecord


@dataclass(frozen=True, slots=True)
class Quality(JsonRecord):
    """Two numbers a frame; both compare pixels in [0, 1] before they are rounded to 8 bits.

    Attributes:
        psnr_db: peak signal-to-noise ratio, infinite for equal frames.
        ssim: structural similarity, 1 for equal frames.
    """

    psnr_db: tuple[float, ...]
    ssim: tuple[float, ...]

    @property
    def mean_psnr_db(self) -> float:
        """Mean over the frames."""
        return fmean(self.psnr_db)

    @property
    def min_psnr_db(self) -> float:
        """Of the worst frame."""
        return min(self.psnr_db)

    def summary(self) -> dict[str, float]:
        """Return mean and worst frame of both."""
        return {
            "mean_psnr_db": self.mean_psnr_db,
            "min_psnr_db": self.min_psnr_db,
            "mean_ssim": fmean(self.ssim),
            "min_ssim": min(self.ssim),
        }


def quality(frames: np.ndarray[Any, Any], reference: np.ndarray[Any, Any]) -> Quality:
    """Compare two clips frame by frame.

    Args:
        frames: (F, H, W, C) in [0, 1].
        reference: the same shape.

    Raises:
        DeviceError: scikit-image is not installed.

    Source: SSIM after Wang et al., "Image quality assessment", 2004, as scikit-image computes it.

    Example:
        >>> import numpy as np
        >>> clip = np.zeros((2, 8, 8, 1), dtype=np.float32)
        >>> round(quality(clip + 0.1, clip).mean_psnr_db, 3)
        20.0
    """
    check_installed()
    from skimage.metrics import structural_similarity

    pairs = list(zip(frames.astype(np.float64), reference.astype(np.float64), strict=True))
    return Quality(
        tuple(psnr_db(float(np.mean((a - b) ** 2))) for a, b in pairs),
        tuple(
            float(structural_similarity(a, b, data_range=1.0, channel_axis=-1)) for a, b in pairs
        ),
    )


def check_installed() -> None:
    """Refuse before hours of drawing, not after them."""
    try:
        import skimage.metrics  # noqa: F401
    except ImportError as error:
        raise DeviceError(
            "SSIM needs scikit-image: pip install 'sage-plugin[media]', or scikit-image alone"
        ) from error


def psnr_db(mse: float) -> float:
    """Return the peak signal-to-noise ratio of pixels in [0, 1] from their mean squared error."""
    return math.inf if mse == 0 else -10 * math.log10(mse)
