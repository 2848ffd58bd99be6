"""Where in a run the error enters: how far the latents of each step are from the baseline's."""

from __future__ import annotations

import math

import torch

from sage_plugin.errors import UsageError


class LatentDrift:
    """The latents of the baseline's run, and the distance of another run's from them.

    Example:
        >>> drift = LatentDrift()
        >>> drift.keep(torch.tensor([3.0, 4.0]))
        >>> drift.distance(0, torch.tensor([3.0, 3.5]))
        0.1
    """

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, latents: torch.Tensor) -> None:
        """Add the latents at the end of the baseline's next step, as fp32 on the CPU."""
        self._kept.append(latents.detach().to("cpu", torch.float32, copy=True))

    def distance(self, step: int, latents: torch.Tensor) -> float:
        """Return the L2 norm of the difference over the L2 norm of the baseline's latents."""
        if step >= len(self._kept):
            raise UsageError(
                f"a run had more than the {len(self._kept)} denoising steps of the baseline; draw "
                "every clip with the same number of steps"
            )
        kept = self._kept[step].double()
        gap = (latents.detach().to("cpu", torch.float64) - kept).norm().item()
        size = kept.norm().item()
        return gap / size if size else (0.0 if gap == 0 else math.inf)
