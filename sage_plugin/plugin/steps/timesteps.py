"""Which denoising step a recording is at, by the timesteps that denoisers are called with.

For models that no known scheduler steps with. Guidance may take one forward a step or two, and a
pipeline may have two denoisers that share its steps: a step is a timestep that differs from the one
before, whichever denoiser it went to.
"""

from __future__ import annotations


class TimestepRuns:
    """Counts steps and runs as timesteps come in.

    Attributes:
        step: the current step, from 0; `None` where the model is called without a timestep.
        runs: how often the timesteps began anew, the first run included.

    Example:
        >>> steps = TimestepRuns()
        >>> for timestep in (900.0, 900.0, 500.0, 100.0, 900.0):
        ...     steps.forward(timestep)
        >>> steps.step, steps.runs
        (0, 2)
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.runs = 0
        self._last: float | None = None
        self._falls: bool | None = None

    def forward(self, timestep: float | None) -> None:
        """Take note of a forward; one whose timestep is not known belongs to the current step."""
        last = self._last
        if timestep is None or timestep == last:
            return
        falls = None if last is None else timestep < last
        if self.step is None or self._falls not in (None, falls):  # one that turns back begins anew
            self.runs += 1
            self.step, self._falls = 0, None
        else:
            self.step += 1
            self._falls = falls
        self._last = timestep
