"""How long a run takes on a CPU, so that nobody waits an hour for numbers that are no speeds."""

from __future__ import annotations

from collections.abc import Iterable

from sage_plugin.bench.compare import CPU_LIMITS
from sage_plugin.measure.cpu_rate import matmul_flops_per_s
from sage_plugin.replay.inputs import ReplayInputs

PATIENCE_S = 60.0
"""A CPU run that is predicted to take longer has to be asked for."""

SLOWER = {"sdpa": 0.5, "torch": 5.0, "portable": 1000.0}
EMULATION = 6.0
"""Time of an attention call over that of plain matrix products of its size, on one CPU.

`portable` runs in Triton's interpreter there."""

CHECKED_CALLS = 2

WEIGHT_VALUE_S = 1e-7
"""Seconds that a kernel takes for each number of a weight, to draw, quantize and judge it (measured
on a Xeon): next to nothing but for the experts of a whole mixture."""


def cpu_seconds(cases: Iterable[ReplayInputs], kernels: Iterable[tuple[str, str]]) -> float:
    """Predict the seconds of all cases on this CPU, to a factor of two or three."""
    rate = matmul_flops_per_s()
    slower = [SLOWER.get(k, SLOWER.get(variant, EMULATION)) for k, variant in kernels]
    total = 0.0
    for case in cases:
        once = case.family.flops(case.saved_shape) / rate
        # Each call is timed with and without quantisation, and the first one again.
        round_s = once * (2 * sum(slower) + max(slower, default=0.0))
        rounds_s = min(CPU_LIMITS.budget_s, CPU_LIMITS.max_samples * round_s)
        timed = CPU_LIMITS.warmup * round_s + max(2 * round_s, rounds_s)
        total += timed + CHECKED_CALLS * once * sum(slower)
        total += WEIGHT_VALUE_S * case.family.weight_values(case.saved_shape) * len(slower)
    return total


def duration(seconds: float) -> str:
    """Write a duration in the largest unit of which it has more than one."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
