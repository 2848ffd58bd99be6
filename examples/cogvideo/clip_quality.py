"""How far a clip is from its reference, frame by frame."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sage_plugin.errors import DeviceError


@dataclass(frozen=True, slots=True)
class Quality:
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
        return sum(self.psnr_db) / len(self.psnr_db)

    @property
    def mean_ssim(self) -> float:
        """Mean over the frames."""
        return sum(self.ssim) / len(self.ssim)


def quality(frames: np.ndarray[Any, Any], reference: np.ndarray[Any, Any]) -> Quality:
    """Compare two clips.

    Args:
        frames: (F, H, W, C) in [0, 1].
        reference: the same shape.

    Raises:
        DeviceError: scikit-image is not installed.

    Source: SSIM after Wang et al., "Image quality assessment", 2004, as scikit-image computes it.
    """
    try:
        from skimage.metrics import structural_similarity
    except ImportError as error:
        raise DeviceError("SSIM needs scikit-image: pip install scikit-image") from error
    pairs = list(zip(frames.astype(np.float64), reference.astype(np.float64), strict=True))
    return Quality(
        tuple(_psnr_db(float(np.mean((a - b) ** 2))) for a, b in pairs),
        tuple(
            float(structural_similarity(a, b, data_range=1.0, channel_axis=-1)) for a, b in pairs
        ),
    )


def _psnr_db(mse: float) -> float:
    return math.inf if mse == 0 else -10 * math.log10(mse)
