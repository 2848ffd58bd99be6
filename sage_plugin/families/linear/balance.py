"""What is done to the input channels of a replayed linear before they are quantized."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from sage_plugin.kernels.linear.rows.row_format import rotation_of
from sage_plugin.kernels.linear.weight import QuantizedWeight, quantize_weight


@dataclass(frozen=True, slots=True, eq=False)
class Balance:
    """Rotation and smoothing of a linear.

    Attributes:
        rotation: most channels of a block that is rotated, 0 for none.
        smooth: `(K,)` that channels are divided by, `None` for none.
    """

    rotation: int = 0
    smooth: torch.Tensor | None = None

    def quantized(self, weight: torch.Tensor, kernel: str) -> QuantizedWeight:
        """Quantize a `(N, K)` weight to match."""
        rotation = rotation_of(weight.shape[1], self.rotation)
        return quantize_weight(weight, kernel, smooth=self.smooth, rotation=rotation)

    def digest(self) -> str:
        """Return a checksum of the factors."""
        data = b"" if self.smooth is None else self.smooth.cpu().numpy().tobytes()
        return hashlib.sha256(data).hexdigest()
