"""Which denoising step a model is at, as far as it can be known."""

from __future__ import annotations

import contextlib
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn

from sage_plugin.kernels.fallback import Fallback
from sage_plugin.plugin.steps import scheduler as schedulers
from sage_plugin.plugin.steps.caller import (
    DenoisingLoop,
    loop_around,
    loop_in_scope,
    loop_of,
    schedulers_of,
)
from sage_plugin.plugin.steps.forward import Forward, Timestep
from sage_plugin.plugin.steps.scheduler import Run

MOST_CALLS_OF_A_STEP = 16
"""Calls of a layer in a graph, whose timesteps are not seen, before a scheduler stands still."""
TRAINED_STEPS = 1000
"""What many denoisers divide the timestep by."""


@dataclass(frozen=True, slots=True)
class Step:
    """Where a forward stands.

    Attributes:
        index: the step of the run, from 0.
        total: how many steps the run has, `None` where that is not known.
        run: tells runs apart.
    """

    index: int
    total: int | None
    run: int


class StepTracker:
    """The denoising steps of models that run.

    The step is that of the scheduler of whoever runs the model, which the call stack tells; its
    schedulers are watched from their first forward on. A loop of somebody's own is known by its
    variables, or else taken for one over `pipeline`; then the run must have begun in this thread,
    and the model's timestep be the scheduler's.

    Args:
        pipeline: whose schedulers are watched from the beginning; it is not kept alive.

    Attributes:
        passed: steps that were seen so far, of all runs.

    Example:
        >>> from diffusers import DDIMScheduler
        >>> class Sampler:
        ...     def __init__(self):
        ...         self.unet, self.scheduler = nn.Linear(1, 1), DDIMScheduler()
        ...     def __call__(self, tracker):
        ...         self.scheduler.set_timesteps(5)
        ...         return tracker.now(self.unet)
        >>> sampler = Sampler()
        >>> sampler(StepTracker(sampler)).total
        5
    """

    def __init__(self, pipeline: object = None) -> None:
        self._pipeline = (lambda: None) if pipeline is None else weakref.ref(pipeline)
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._here = _Thread()
        self.passed = 0
        for scheduler in schedulers_of(pipeline).values():
            self._watch(scheduler)

    def enter(self, forward: Forward) -> Step | Fallback:
        """Find the step of a forward that begins; `leave` ends it."""
        found = self.at(forward)
        self._here.running.append((forward.model, found))
        return found

    def at(self, forward: Forward) -> Step | Fallback:
        """The step of a forward that begins, or why it cannot be known."""
        return self._find(forward.model, forward)

    def leave(self) -> None:
        """Take note that the innermost forward ended."""
        if self._here.running:
            self._here.running.pop()

    def now(self, module: nn.Module, layer: object = None) -> Step | Fallback:
        """The step of a call of a module's layer, or why it cannot be known."""
        if self._here.running and self._here.running[-1][0] is module:
            return self._here.running[-1][1]
        return self._find(module, None, layer)

    def stop(self) -> None:
        """Leave all schedulers as they were."""
        for scheduler in tuple(self._watched):
            schedulers.release(scheduler, self)
        self._watched.clear()

    def _watch(self, scheduler: Any) -> bool:  # noqa: ANN401
        """Count the steps of a scheduler; whether that begins now. One may refuse to be changed."""
        with contextlib.suppress(TypeError):
            if scheduler in self._watched:
                return False
            met = schedulers.watch(scheduler, self)
            self._watched.add(scheduler)
            return met
        return False

    def _find(
        self, module: nn.Module, forward: Forward | None, layer: object = None
    ) -> Step | Fallback:
        loop = loop_around(module)
        certain = loop is not None
        if loop is None:
            loop = self._loop_of_its_own(module, forward)
        if loop is None:
            return Fallback.STEP_WITHOUT_SCHEDULER
        met = [scheduler for scheduler in loop.schedulers.values() if self._watch(scheduler)]
        scheduler = loop.scheduler()
        run = schedulers.run_of(scheduler)
        if run is None:
            return Fallback.STEP_OUTSIDE_RUN
        if not certain and not _agrees(run, scheduler, forward):
            return Fallback.STEP_WITHOUT_SCHEDULER
        if scheduler in met and run.unknown is not None:
            run = schedulers.note(scheduler, _met(run, scheduler, loop, forward))
        if run.unknown is None and self._stands_still(module, run, forward, layer):
            run = schedulers.note(scheduler, run._replace(unknown=Fallback.STEP_STANDS_STILL))
        if run.unknown is not None:
            return run.unknown
        if run.total is None:
            total = _total(run, scheduler, loop, forward)
            run = schedulers.note(scheduler, run._replace(total=total))
        if run.total is not None and run.steps >= run.total:
            return Fallback.STEP_OUTSIDE_RUN
        return self._passed(Step(run.steps, run.total, run.number))

    def _loop_of_its_own(self, module: nn.Module, forward: Forward | None) -> DenoisingLoop | None:
        """What runs a module in no pipeline's method: by callers' variables, or `pipeline`."""
        loop = loop_in_scope(module)
        if loop is not None:
            return loop
        pipeline = self._pipeline()
        knows_time = forward is not None and forward.timestep is not None
        return loop_of(pipeline, module) if pipeline is not None and knows_time else None

    def _passed(self, step: Step) -> Step:
        if (step.run, step.index) != self._here.last:
            self._here.last = (step.run, step.index)
            self.passed += 1
        return step

    def _stands_still(
        self, module: nn.Module, run: Run, forward: Forward | None, layer: object
    ) -> bool:
        """Whether the model went on to another timestep, and the scheduler did not step."""
        key = module if layer is None else layer
        before = self._here.seen.get(key)
        same = before is not None and before[:2] == (run.number, run.steps)
        calls = before[2] + 1 if before is not None and same else 1
        time = None if forward is None else forward.time
        self._here.seen[key] = (run.number, run.steps, calls, time)
        if not same or before is None:
            return False
        if time is None or before[3] is None:
            return calls > MOST_CALLS_OF_A_STEP
        return not time.may_equal(before[3])


class _Thread(threading.local):
    """What a tracker knows of the thread: running forwards, the last step, the last calls."""

    def __init__(self) -> None:
        self.running: list[tuple[nn.Module, Step | Fallback]] = []
        self.last: tuple[int, int] | None = None
        self.seen: weakref.WeakKeyDictionary[Any, tuple[int, int, int, Timestep | None]] = (
            weakref.WeakKeyDictionary()
        )


def _agrees(run: Run, scheduler: Any, forward: Forward | None) -> bool:  # noqa: ANN401
    """Whether a forward in no method of a pipeline can be of this run, by thread and timestep."""
    if run.thread != threading.get_ident():
        return False
    if forward is None or forward.timestep is None:
        return True
    place = run.steps + (getattr(scheduler, "begin_index", None) or 0)
    timesteps = getattr(scheduler, "timesteps", None)
    if timesteps is None or place >= len(timesteps):
        return False
    due = float(timesteps[place])
    near = (due, due / TRAINED_STEPS, 1 - due / TRAINED_STEPS)
    return any(abs(forward.timestep - value) <= 1e-2 * abs(value) for value in near)


def _met(run: Run, scheduler: Any, loop: DenoisingLoop, forward: Forward | None) -> Run:  # noqa: ANN401
    """A run whose scheduler keeps no account, at its first forward here: is it the run's first?"""
    place = None if forward is None else schedulers.position_of(forward.timestep, scheduler)
    left = schedulers.steps_left(scheduler)
    announced = loop.announced()
    first = 0 if announced is None or left is None else left - announced
    return run._replace(unknown=None) if place is not None and place in (0, first) else run


def _total(run: Run, scheduler: object, loop: DenoisingLoop, forward: Forward | None) -> int | None:
    """How many steps a run has: what its loop says, or what its scheduler has left."""
    left = schedulers.steps_left(scheduler)
    if left is None:
        return None
    announced = loop.announced() or 0
    if 0 < announced <= left:
        return announced
    if not hasattr(scheduler, "begin_index") and forward is not None:
        place = schedulers.position_of(forward.timestep, scheduler)
        left -= max(0, (place or 0) - run.steps)
    return left
