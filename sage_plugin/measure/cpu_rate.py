"""How fast this CPU multiplies matrices: the yardstick of forecasts."""

from __future__ import annotations

import time

import torch

PROBE = 256


def matmul_flops_per_s() -> float:
    """Measure the speed of fp32 matrix products here, in a few milliseconds."""
    a = torch.ones(PROBE, PROBE)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * PROBE**3 / best
