"""Medians and paired gains with their intervals, in plain Python over a few hundred samples."""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist, mean, median, stdev

EXACT_RANKS = 40
"""Up to this many pairs the distribution of the signed-rank sum is counted, not approximated."""


def median_interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its distribution-free 95 % interval, by binomial order statistics.

    Below six samples no such interval reaches 95 %; the range of the samples is returned.

    Args:
        samples: at least one measurement.

    Returns:
        `(median, low, high)` in the unit of the samples.

    Raises:
        ValueError: there is no sample.

    Example:
        >>> median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
        (5.0, 2.0, 8.0)
    """
    if not samples:
        raise ValueError("median_interval: got no samples, needs at least one")
    ordered = sorted(samples)
    rank = _binomial_rank(len(ordered))
    return median(ordered), ordered[rank], ordered[-1 - rank]


@cache
def _binomial_rank(n: int) -> int:
    """Largest `r` such that the order statistics `r` and `n - 1 - r` cover the median."""
    tail, rank, term = 0.0, 0, 0.5**n
    while rank < n // 2:
        tail += term
        if tail > 0.025:
            break
        term *= (n - rank) / (rank + 1)
        rank += 1
    return max(0, rank - 1)


MOST_EXPONENT = math.log(sys.float_info.max)


def gain_interval(
    base: Sequence[float], new: Sequence[float], confidence: float = 0.95
) -> tuple[float, float, float]:
    """Estimate the gain of `new` over `base`, from samples taken in pairs.

    The gain is `1 - new / base`: 0.1 means that a tenth of the time is saved. It is the
    Hodges-Lehmann estimate on the logarithms of the paired ratios with Wilcoxon's signed-rank
    interval, so that drift common to a pair cancels and a spike counts as one sample. Hodges and
    Lehmann, "Estimates of location based on rank tests", 1963.

    Args:
        base: times of the baseline; `base[i]` and `new[i]` come from one round.
        new: times of the candidate.
        confidence: coverage of the interval, between 0 and 1.

    Returns:
        `(gain, low, high)`; promote where `low` is above the least gain that matters.

    Raises:
        ValueError: the lengths differ, there are fewer than two pairs, or a time is not positive.

    Example:
        >>> gain, low, high = gain_interval([2.0, 2.1, 2.0, 1.9, 2.0, 2.2, 2.0], [1.0] * 7)
        >>> round(gain, 2), low > 0.4
        (0.5, True)
    """
    if len(base) != len(new) or len(base) < 2:
        raise ValueError(
            f"gain_interval: got {len(base)} and {len(new)} samples, needs two or more pairs"
        )
    if min(*base, *new) <= 0:
        raise ValueError("gain_interval: every time must be above zero")
    logs = [math.log(n / b) for b, n in zip(base, new, strict=True)]
    center, low, high = _location(logs, confidence)
    return 1 - math.exp(center), 1 - _exp(high), 1 - _exp(low)


def _exp(value: float) -> float:
    """The exponential, infinite where it is more than a float holds."""
    return math.exp(value) if value < MOST_EXPONENT else math.inf


def _location(values: list[float], confidence: float) -> tuple[float, float, float]:
    """Centre of symmetric values with its interval: Student's where no rank is as sure."""
    n = len(values)
    if 0.5 ** (n - 1) > 1 - confidence:
        half = _student(n - 1, confidence) * stdev(values) / math.sqrt(n)
        return mean(values), mean(values) - half, mean(values) + half
    walsh = sorted((values[i] + values[j]) / 2 for i in range(n) for j in range(i, n))
    rank = _signed_rank(n, confidence)
    return median(walsh), walsh[rank], walsh[-1 - rank]


@cache
def _signed_rank(n: int, confidence: float) -> int:
    """Largest sum of ranks whose lower tail stays within half of `1 - confidence`."""
    tail = (1 - confidence) / 2
    if n > EXACT_RANKS:
        center = n * (n + 1) / 4
        spread = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return max(0, math.floor(center + NormalDist().inv_cdf(tail) * spread - 0.5))
    counts = [1]
    for rank in range(1, n + 1):
        grown = counts + [0] * rank
        for total, ways in enumerate(counts):
            grown[total + rank] += ways
        counts = grown
    sums: list[int] = []
    for ways in counts:
        sums.append(ways + (sums[-1] if sums else 0))
    return max(0, bisect.bisect_right(sums, tail * 2**n) - 1)


@cache
def _student(freedom: int, confidence: float) -> float:
    """Two-sided quantile of Student's t, by bisection on its integrated density."""
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))

    def half_mass(limit: float, steps: int = 2000) -> float:
        # Substituting t = tan(u) keeps the heavy tail within a finite range.
        top = math.atan(limit)
        width = top / steps
        return width * math.fsum(
            scale
            * (1 + math.tan(u) ** 2 / freedom) ** (-(freedom + 1) / 2)
            * (1 + math.tan(u) ** 2)
            for u in ((i + 0.5) * width for i in range(steps))
        )

    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if half_mass(middle) < confidence / 2 else (low, middle)
    return high
