"""The denoising steps of a recording: those of schedulers, or else of the models' timesteps."""

from __future__ import annotations

from sage_plugin.plugin.steps.forward import Forward
from sage_plugin.plugin.steps.timesteps import TimestepRuns
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
