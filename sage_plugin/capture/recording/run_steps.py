"""The denoising steps of a recording: those of schedulers, or else of the models' timesteps."""

from __future__ import annotations

from sage_plugin.plugin.steps.forward import Forward
from sage_plugin.plugin.steps.tracker import Step, StepTracker


class RunSteps:
    """Counts steps and runs as forwards come in.

    Attributes:
        tracker: knows the steps of schedulers.
        step: the current step, from 0; `None` where nothing tells it.
        steps: steps of the longest run so far, `None` before the first.
        runs: how many runs there were.
    """

    def __init__(self) -> None:
        self.tracker = StepTracker()
        self.step: int | None = None
        self.steps: int | None = None
        self.runs = 0
        self._by_timesteps = TimestepRuns()
        self._run: tuple[str, int] | None = None

    def follow(self, pipeline: object) -> None:
        """Count by the schedulers of a pipeline from here on."""
        self.tracker.stop()
        self.tracker = StepTracker(pipeline)

    def forward(self, forward: Forward) -> None:
        """Take note of a forward; one that nothing tells the step of belongs to the current one."""
        self._by_timesteps.forward(forward.timestep)
        found = self.tracker.at(forward)
        if isinstance(found, Step):
            run, self.step = ("scheduler", found.run), found.index
        elif self._by_timesteps.step is not None:
            run, self.step = ("timesteps", self._by_timesteps.runs), self._by_timesteps.step
        else:
            return
        self.runs += run != self._run
        self._run = run
        self.steps = max(self.steps or 0, self.step + 1)


class TimestepRuns:
    """Counts steps and runs as timesteps come in, for models that no known scheduler steps with.

    Guidance may take one forward a step or two, and a pipeline may have two denoisers that share
    its steps: a step is a timestep that differs from the one before, whichever denoiser it went to.

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
