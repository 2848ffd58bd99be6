"""Timed runs of all configs, interleaved in random order: each round draws every clip once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

from torch import nn

from sage_plugin.bench.clips.draw import Subject
from sage_plugin.bench.clips.stopwatch import RunTime, Stopwatch, run_time
from sage_plugin.measure.timing import TimingLimits, interleave

LIMITS = TimingLimits(warmup=0, warmup_s=0.0, min_samples=5, max_samples=30, budget_s=60.0)
"""No warm-up: each clip was drawn before. Two rounds are taken at least, whatever the budget."""

Patched = Callable[[], contextlib.AbstractContextManager[object]]


def time_runs(
    subject: Subject,
    patches: Mapping[str, Patched],
    denoisers: Sequence[nn.Module],
    *,
    limits: TimingLimits = LIMITS,
    seed: int = 0,
    on_run: Callable[[str, int], None] = lambda name, number: None,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, RunTime]:
    """Time whole runs against each other.

    Args:
        subject: what is drawn.
        patches: by name, what the pipeline is patched with around a run; patching is not timed.
        denoisers: modules whose first forward begins the first step.
        limits: when the rounds end.
        seed: of the order within the rounds.
        on_run: called with the name and the round, from 1, before each run.
        now: seconds of a steady clock.

    Raises:
        UsageError: a run reported no denoising steps.
    """
    watches: dict[str, list[Stopwatch]] = {name: [] for name in patches}

    def run_round(order: Sequence[str]) -> list[float]:
        for name in order:
            on_run(name, len(watches[name]) + 1)
            watch = Stopwatch(subject.wait, now)
            with patches[name](), _forwards_marked(denoisers, watch):
                watch.start()
                subject.draw(lambda latents, watch=watch: watch.mark_step())  # type: ignore[misc]
                watch.stop()
            watches[name].append(watch)
        return [fmean(watches[name][-1].steps_ms) for name in order]

    interleave(list(patches), run_round, limits=limits, seed=seed, now=now)
    return {name: run_time(runs) for name, runs in watches.items()}


@contextlib.contextmanager
def _forwards_marked(denoisers: Sequence[nn.Module], watch: Stopwatch) -> Iterator[None]:
    hooks = [
        module.register_forward_pre_hook(lambda *_: watch.mark_first_forward())
        for module in denoisers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
