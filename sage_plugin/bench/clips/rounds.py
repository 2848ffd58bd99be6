"""Timed runs of all ways, interleaved in random order: each round draws every clip once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from sage_plugin.bench.clips.draw import Draw
from sage_plugin.bench.clips.stopwatch import RunTime, Stopwatch, run_time
from sage_plugin.measure.timing import TimingLimits, interleave

LIMITS = TimingLimits(warmup=0, warmup_s=0.0, min_samples=5, max_samples=30, budget_s=60.0)
"""No warm-up: each clip was drawn before. Two rounds are taken at least, whatever the budget."""

Patched = Callable[[], contextlib.AbstractContextManager[object]]


def time_runs(
    draw: Draw,
    patches: Mapping[str, Patched],
    denoisers: Sequence[nn.Module],
    *,
    device: torch.device,
    limits: TimingLimits = LIMITS,
    seed: int = 0,
    on_run: Callable[[str, int], None] = lambda name, number: None,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, RunTime]:
    """Time whole runs against each other.

    Args:
        draw: draws the clip.
        patches: by name, what the pipeline is patched with around a run; patching is not timed.
        denoisers: modules whose first forward begins the first step.
        device: what is waited for around each mark.
        limits: when the rounds end.
        seed: of the order within the rounds.
        on_run: told the name and the round, from 1, before each run.
        now: seconds of a steady clock.

    Raises:
        UsageError: a run told no denoising steps.
    """
    watches: dict[str, list[Stopwatch]] = {name: [] for name in patches}

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def run_round(order: Sequence[str]) -> list[float]:
        for name in order:
            on_run(name, len(watches[name]) + 1)
            watch = Stopwatch(wait, now)
            with patches[name](), _told_of_forwards(denoisers, watch):
                _run(draw, watch)
            watches[name].append(watch)
        return [_mean(watches[name][-1].steps_ms) for name in order]

    interleave(list(patches), run_round, limits=limits, seed=seed, now=now)
    return {name: run_time(runs) for name, runs in watches.items()}


def _run(draw: Draw, watch: Stopwatch) -> None:
    watch.start()
    draw(lambda latents: watch.step())
    watch.stop()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@contextlib.contextmanager
def _told_of_forwards(denoisers: Sequence[nn.Module], watch: Stopwatch) -> Iterator[None]:
    def tell(*_: object) -> None:
        watch.forward()

    hooks = [module.register_forward_pre_hook(tell) for module in denoisers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
