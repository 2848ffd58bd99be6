"""The one timing code: variants interleaved in random order, cold L2, medians with intervals.

Every round times each function once, in an order drawn anew from the seed, so that drift of the
clocks falls on all alike and `ms[i]` of two functions form a pair.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sage_plugin.errors import DeviceError, UsageError
from sage_plugin.measure import timers
from sage_plugin.measure.statistics import gain_interval, median_interval
from sage_plugin.schema import Timing

Keep = Callable[[Mapping[str, Sequence[float]]], Collection[str]]
"""Chooses, from the times so far, which functions are timed on; none ends the measurement."""


@dataclass(frozen=True, slots=True)
class TimingLimits:
    """When a measurement ends; the caps are hard.

    Attributes:
        warmup: rounds whose times are thrown away.
        warmup_s: the rounds go on until this much time is spent, too.
        min_samples: rounds before the precision may end the measurement.
        max_samples: rounds after which it ends whatever the precision.
        budget_s: time after which it ends whatever the precision; two rounds are always taken,
            because one sample has no interval.
        precision: it ends when each 95 % interval is narrower than this share of its median.
    """

    warmup: int = 3
    warmup_s: float = 0.2
    min_samples: int = 20
    max_samples: int = 200
    budget_s: float = 10.0
    precision: float = 0.01

    def __post_init__(self) -> None:
        """Refuse limits that no measurement can keep."""
        if self.max_samples < 2 or self.min_samples < 1 or self.warmup < 0:
            raise UsageError(
                f"measure: got max_samples={self.max_samples}, min_samples={self.min_samples}, "
                f"warmup={self.warmup}; needs at least 2, 1 and 0"
            )


DEFAULT_LIMITS = TimingLimits()


@dataclass(frozen=True, slots=True)
class Samples:
    """Times of one function, in the order of the rounds.

    Attributes:
        name: the name under which the function was given.
        ms: one time per round, milliseconds.
        method: how they were taken: `events`, `graph`, `profiler` or `wall`, with `/warm` behind
            it where L2 was not made cold.
    """

    name: str
    ms: tuple[float, ...]
    method: str

    def timing(self) -> Timing:
        """Return the median with its 95 % interval."""
        center, low, high = median_interval(self.ms)
        return Timing(
            median_ms=center, low_ms=low, high_ms=high, n=len(self.ms), method=self.method
        )

    def gain_over(self, base: Samples) -> tuple[float, float, float]:
        """Paired gain over `base` from the same measurement, as `(gain, low, high)`."""
        if self.method != base.method:
            raise ValueError(
                f"{self.name} was timed by {self.method} and {base.name} by {base.method}: "
                "times of two methods are never compared; measure both in one call"
            )
        return gain_interval(base.ms, self.ms)

    def speedup_over(self, base: Samples) -> tuple[float, float, float]:
        """Return the time of `base` over this one's, with its interval; infinite for no time."""
        rests = (1 - gain for gain in self.gain_over(base))
        center, low, high = (1 / rest if rest > 0 else math.inf for rest in rests)
        return center, low, high


def measure(
    functions: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str,
    method: str | None = None,
    limits: TimingLimits = DEFAULT_LIMITS,
    cold_l2: bool = True,
    seed: int = 0,
    keep: Keep | None = None,
    **changes: float | None,
) -> dict[str, Samples]:
    """Time functions against each other, interleaved.

    Args:
        functions: name to a call without arguments; it launches its work on the current stream.
        device: where the work runs.
        method: `events` (default on a GPU), `graph` (the call is captured in a CUDA graph, so that
            the host's launch time is gone), `profiler` (the kernels' own time) or `wall` (the only
            one on a CPU, and its default).
        limits: when the measurement ends.
        cold_l2: write a buffer larger than twice L2 before each timed call.
        seed: of the order within the rounds.
        keep: asked after each round which functions are timed on, by default all.
        changes: fields of `limits` that differ, `None` for those that do not.

    Returns:
        Samples by name, each with the same number of rounds, but for those that `keep` dropped.

    Raises:
        UsageError: no function, an unknown method, or one that the device has not.
        DeviceError: no such device.

    Example:
        >>> samples = measure({"sum": lambda: sum(range(1000))}, device="cpu", budget_s=0.05)
        >>> samples["sum"].method
        'wall'
    """
    if not functions:
        raise UsageError("measure: got no function, needs at least one")
    resolved = _device(device)
    chosen = method or ("wall" if resolved.type == "cpu" else "events")
    given = {name: value for name, value in changes.items() if value is not None}
    limits = replace(limits, **given)  # type: ignore[arg-type]
    label = chosen if cold_l2 or chosen == "wall" else f"{chosen}/warm"
    with timers.timer(functions, resolved, chosen, cold_l2=cold_l2) as run_round:
        ms = interleave(list(functions), run_round, limits=limits, seed=seed, keep=keep)
    return {name: Samples(name=name, ms=tuple(ms[name]), method=label) for name in functions}


def interleave(
    names: Sequence[str],
    run_round: timers.Round,
    *,
    limits: TimingLimits = DEFAULT_LIMITS,
    seed: int = 0,
    keep: Keep | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Take rounds until the limits say stop; knows no device, so that fakes can stand in."""
    order = random.Random(seed)
    start = now()
    rounds = 0
    while rounds < limits.warmup or now() - start < limits.warmup_s:
        run_round(order.sample(names, len(names)))
        rounds += 1
        # A round that is slow by itself must not spend the budget on warming up.
        if rounds >= limits.max_samples or now() - start >= limits.budget_s / 4:
            break
    ms: dict[str, list[float]] = {name: [] for name in names}
    for taken in range(1, limits.max_samples + 1):
        drawn = order.sample(names, len(names))
        for name, value in zip(drawn, run_round(drawn), strict=True):
            ms[name].append(value)
        if keep is not None:
            kept = keep(ms)
            names = [name for name in names if name in kept]
            if not names:
                break
        if taken >= 2 and now() - start >= limits.budget_s:
            break
        if taken >= limits.min_samples and _precise(ms, limits.precision):
            break
    return ms


def _precise(ms: Mapping[str, Sequence[float]], precision: float) -> bool:
    intervals = (median_interval(values) for values in ms.values())
    return all(high - low <= precision * center for center, low, high in intervals)


def _device(device: torch.device | str) -> torch.device:
    resolved = torch.device(device)
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError("no GPU that torch can use: time on device='cpu', or use a GPU build")
    if resolved.type not in ("cpu", "cuda"):
        raise UsageError(f"measure: got device {str(resolved)!r}, knows cpu and cuda")
    return resolved
