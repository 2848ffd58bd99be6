"""Small runs in place of whole ones: times on a CPU are no speeds, and clips are the same code."""

from __future__ import annotations

import dataclasses

import pytest

from sage_plugin.bench import compare
from sage_plugin.demo.sizes import SIZES
from sage_plugin.tune.configs import plan

FRAMES = 8


def keep_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a few samples of each call that is timed on a CPU, and draw half as many frames."""
    limits = dataclasses.replace(compare.CPU_LIMITS, max_samples=5, budget_s=0.2)
    monkeypatch.setattr(compare, "CPU_LIMITS", limits)
    timer = dataclasses.replace(plan.TIMERS["cpu"], screen_s=0.2, race_rounds=8, race_s=0.5)
    monkeypatch.setitem(plan.TIMERS, "cpu", timer)
    small = dataclasses.replace(SIZES["small"], frames=FRAMES)
    monkeypatch.setitem(SIZES, "small", small)
