"""Where in a run the error enters: how far the latents of each step are from the host's."""

from __future__ import annotations

import math

import torch

from sage_plugin.errors import UsageError


class Curve:
    """The latents of the host's run, and the distance of another run's from them.

    Example:
        >>> curve = Curve()
        >>> curve.keep(torch.tensor([3.0, 4.0]))
        >>> curve.distance(0, torch.tensor([3.0, 3.5]))
        0.1
    """

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, latents: torch.Tensor) -> None:
        """Add the latents at the end of the host's next step, as fp32 on the CPU."""
        self._kept.append(latents.detach().to("cpu", torch.float32, copy=True))

    def distance(self, step: int, latents: torch.Tensor) -> float:
        """L2 norm of the difference over the L2 norm of the host's latents.

        Args:
            step: denoising step, from 0.
            latents: the latents at its end, shaped as the host's.

        Raises:
            UsageError: the host's run had no such step.
        """
        if step >= len(self._kept):
            raise UsageError(
                f"a run had more than the {len(self._kept)} denoising steps of the host's; draw "
                "every clip with the same number of steps"
            )
        host = self._kept[step].double()
        gap = (latents.detach().to("cpu", torch.float64) - host).norm().item()
        size = host.norm().item()
        return gap / size if size else (0.0 if gap == 0 else math.inf)
