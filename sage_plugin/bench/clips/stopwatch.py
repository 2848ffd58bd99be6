"""The time of whole runs: marks at the ends of the denoising steps, and what they come to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from sage_plugin.errors import UsageError
from sage_plugin.measure.statistics import median_interval
from sage_plugin.schema import JsonRecord


@dataclass(frozen=True, slots=True)
class RunTime(JsonRecord):
    """Times of one run config over several runs.

    A step's time is the mean over all steps of a run: a policy's steps differ, so that their median
    would hide those that it runs on slower kernels.

    `step_ms` and `run_ms` are medians over the runs with 95 % intervals, `steps_ms` medians of each
    step.
    """

    step_ms: float
    step_low_ms: float
    step_high_ms: float
    steps_ms: tuple[float, ...]
    run_ms: float
    run_low_ms: float
    run_high_ms: float
    runs: int


@dataclass(slots=True)
class Stopwatch:
    """Marks of one run; every mark waits for the device first.

    Attributes:
        wait: returns when the device has nothing left to do.
        now: seconds of a steady clock.

    Example:
        >>> ticks = iter([0.0, 0.5, 0.6, 0.8, 1.0])
        >>> watch = Stopwatch(now=lambda: next(ticks))
        >>> watch.start()
        >>> watch.mark_first_forward()
        >>> watch.mark_step(), watch.mark_step()
        (None, None)
        >>> watch.stop()
        >>> [round(ms) for ms in watch.steps_ms], watch.run_ms
        ([100, 200], 1000.0)
    """

    wait: Callable[[], object] = lambda: None
    now: Callable[[], float] = time.perf_counter
    _marks: list[float] = field(default_factory=list)
    _first: float | None = None
    _ends: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Begin the run."""
        self._marks.append(self._mark())

    def mark_first_forward(self) -> None:
        """Note a call of the denoiser: the first one begins the first step."""
        if self._first is None:
            self._first = self._mark()

    def mark_step(self) -> None:
        """Note the end of a denoising step."""
        self._ends.append(self._mark())

    def stop(self) -> None:
        """End the run: the clip is there."""
        self._marks.append(self._mark())

    @property
    def run_ms(self) -> float:
        """Milliseconds from start to stop."""
        return 1e3 * (self._marks[1] - self._marks[0])

    @property
    def steps_ms(self) -> tuple[float, ...]:
        """Milliseconds of each denoising step."""
        if not self._ends:
            raise UsageError(
                "the pipeline reported the end of no denoising step, so that none can be timed"
            )
        begin = self._marks[0] if self._first is None else self._first
        return tuple(1e3 * (b - a) for a, b in zip([begin, *self._ends], self._ends, strict=False))

    def _mark(self) -> float:
        self.wait()
        return self.now()


def run_time(watches: Sequence[Stopwatch]) -> RunTime:
    """Sum up the runs of one config."""
    steps = [watch.steps_ms for watch in watches]
    if len({len(one) for one in steps}) != 1:
        raise UsageError("the runs had different numbers of denoising steps: draw the same clip")
    step_ms, step_low_ms, step_high_ms = median_interval([sum(one) / len(one) for one in steps])
    run_ms, run_low_ms, run_high_ms = median_interval([watch.run_ms for watch in watches])
    return RunTime(
        step_ms=step_ms,
        step_low_ms=step_low_ms,
        step_high_ms=step_high_ms,
        steps_ms=tuple(median(position) for position in zip(*steps, strict=True)),
        run_ms=run_ms,
        run_low_ms=run_low_ms,
        run_high_ms=run_high_ms,
        runs=len(watches),
    )
