"""The Pareto front of single kernels in the plane of time and PSNR, and what lies above it.

A point on the front is what mixing two kernels blindly would be expected to give; a policy is worth
its name where it lies on it or above.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from sage_plugin.schema import JsonRecord


@dataclass(frozen=True, slots=True)
class Point(JsonRecord):
    """One run config in the plane.

    Attributes:
        name: of the config.
        ms: milliseconds of a denoising step.
        psnr_db: mean PSNR of the clip's frames against the baseline's, infinite for the same clip.
    """

    name: str
    ms: float
    psnr_db: float


def pareto_front(kernels: Sequence[Point]) -> tuple[Point, ...]:
    """Return the corners, the fastest first: those that no other beats in time and PSNR.

    Clips that equal the baseline's have no place in the plane and are left out.

    Example:
        >>> points = [Point("a", 1.0, 30.0), Point("b", 2.0, 40.0), Point("c", 3.0, 35.0)]
        >>> [point.name for point in pareto_front(points)]
        ['a', 'b']
    """
    ordered = sorted(
        (point for point in kernels if math.isfinite(point.psnr_db) and math.isfinite(point.ms)),
        key=lambda point: (point.ms, -point.psnr_db),
    )
    corners: list[Point] = []
    for point in ordered:
        if not corners or point.psnr_db > corners[-1].psnr_db:
            corners.append(point)
    return tuple(corners)


def gain_over_front(policy: Point, kernels: Sequence[Point]) -> float | None:
    """Return how many dB a policy lies above the front, negative if below.

    Left of the front it is compared with the fastest corner, right of it with the slowest. `None`
    if no kernel has a place in the plane; infinite if the policy drew the baseline's own clip.

    Example:
        >>> kernels = [Point("a", 1.0, 30.0), Point("b", 2.0, 40.0)]
        >>> gain_over_front(Point("policy", 1.5, 36.0), kernels)
        1.0
    """
    corners = pareto_front(kernels)
    if not corners:
        return None
    return policy.psnr_db - _height(policy.ms, corners)


def _height(ms: float, corners: Sequence[Point]) -> float:
    """PSNR of the front at a time, flat beyond its ends."""
    if ms <= corners[0].ms:
        return corners[0].psnr_db
    for left, right in itertools.pairwise(corners):
        if ms <= right.ms:
            share = (ms - left.ms) / (right.ms - left.ms)
            return left.psnr_db + share * (right.psnr_db - left.psnr_db)
    return corners[-1].psnr_db
