"""What a comparison of clips comes to, in words, and its drift as a row of bars each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sage_plugin.bench.clips.record import ClipComparison
from sage_plugin.bench.clips.run_config import POLICY

BARS = "▁▂▃▄▅▆▇█"
DECADES = 4
"""Errors so many powers of ten below the largest have the lowest bar."""


def verdict(comparison: ClipComparison) -> str:
    """Say in one sentence how the policy stands against the single kernels."""
    policy = comparison.of(POLICY)
    if policy is None:
        return "No policy was drawn with."
    if policy.time is None:
        return (
            "Nothing was timed, since kernels are emulated on a CPU: where the policy lies in the "
            "plane of time and PSNR shows on a GPU."
        )
    if math.isinf(policy.quality.mean_psnr_db):
        return "The policy draws the baseline's own clip, to the bit."
    gap = comparison.gain_over_front_db
    if gap is None:
        return "No single kernel has a place in the plane of time and PSNR to compare with."
    where = "above" if gap >= 0 else "below"
    return f"The policy lies {abs(gap):.1f} dB {where} the front of single kernels."


def bars(curve: Sequence[float], largest: float) -> str:
    """Draw a curve as one character per step, on a logarithmic scale that ends at `largest`."""
    return "".join(_bar(value, largest) for value in curve)


def _bar(value: float, largest: float) -> str:
    if not value > 0 or not largest > 0:
        return BARS[0]
    height = 1 + math.log10(value / largest) / DECADES if math.isfinite(value) else 1.0
    return BARS[round(max(0.0, min(1.0, height)) * (len(BARS) - 1))]


def largest_error(comparison: ClipComparison) -> float:
    """Return the largest error of all steps of all clips, 0 if there is none."""
    return max(
        (x for row in comparison.rows for x in row.step_error if math.isfinite(x)), default=0.0
    )


def worst_step(curve: Sequence[float]) -> int | None:
    """Return the step in which most error came in, from 0; `None` if none did."""
    gains = [after - before for before, after in zip((0.0, *curve), curve, strict=False)]
    return None if not gains or max(gains) <= 0 else gains.index(max(gains))
