"""Which denoising step a recording is at, by the timesteps that denoisers are called with.

Guidance may take one forward a step or two, and a pipeline may have two denoisers that share its
steps: a step is a timestep that differs from the one before, whichever denoiser it went to.
"""

from __future__ import annotations


class DenoisingSteps:
    """Counts steps and runs as forwards come in.

    Attributes:
        step: the current step, from 0; `None` where the model is called without a timestep.
        steps: steps of the longest run so far, `None` before the first.
        runs: how often the timesteps began anew, the first run included.

    Example:
        >>> steps = DenoisingSteps()
        >>> for timestep in (900.0, 900.0, 500.0, 100.0, 900.0):
        ...     steps.forward(timestep)
        >>> steps.step, steps.steps, steps.runs
        (0, 3, 2)
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.steps: int | None = None
        self.runs = 0
        self._last: float | None = None
        self._falls: bool | None = None

    def forward(self, timestep: float | None) -> None:
        """Take note of a forward and the timestep that it was called with."""
        if timestep is None:
            self.step = None
            return
        if timestep == self._last and self.step is not None:
            return
        if self._begins(timestep):
            self.runs += 1
            self.step, self._falls = 0, None
        else:
            assert self.step is not None and self._last is not None  # a run is going on
            self.step += 1
            self._falls = timestep < self._last
        self._last = timestep
        self.steps = max(self.steps or 0, self.step + 1)

    def _begins(self, timestep: float) -> bool:
        """Whether a run begins: the first timestep, or one that turns back."""
        if self._last is None or self.step is None:
            return True
        return self._falls is not None and (timestep < self._last) != self._falls
