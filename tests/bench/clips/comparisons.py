"""Comparisons with numbers that are easy to follow."""

from __future__ import annotations

import math

from sage_plugin.bench.clips.record import ClipComparison, ClipRow
from sage_plugin.bench.clips.stopwatch import RunTime
from sage_plugin.demo.quality import Quality

STEPS = 4


def row(name, psnr_db, *, step_ms=None, error=0.0, predicted=(None, None, None)):
    """A row with two frames 1 dB apart around a mean PSNR; its error doubles with each step."""
    time = None
    if step_ms is not None:
        time = RunTime(step_ms, 0.99 * step_ms, 1.01 * step_ms, (step_ms,) * STEPS, 4 * step_ms + 1,
                       4 * step_ms, 4 * step_ms + 2, 5)  # fmt: skip
    ms, mean_error, saved = predicted
    return ClipRow(
        name=name,
        quality=Quality((psnr_db - 0.5, psnr_db + 0.5), (0.9, 0.95)),
        step_error=tuple(error * 2**step for step in range(STEPS)),
        kernel_calls=0 if name == "sdpa" else 16,
        attention_calls=16,
        ran={"sdpa:host" if name == "sdpa" else f"{name}:hopper": 16},
        time=time,
        saved_ms=None if step_ms is None else 4 * (10.0 - step_ms),
        predicted_ms=ms,
        predicted_error=mean_error,
        predicted_saved_ms=saved,
        note="" if step_ms is not None else "emulation: not a speed",
    )


def timed(policy_psnr_db=36.0, policy_ms=5.0):
    """On a GPU: `fav3_fp8` at 4 ms and 30 dB, `sage` at 6 ms and 40 dB, and a policy."""
    return ClipComparison(
        (
            row("sdpa", math.inf, step_ms=10.0, predicted=(24.0, 0.0, 0.0)),
            row("fav3_fp8", 30.0, step_ms=4.0, error=0.01, predicted=(6.0, 0.5, 18.0)),
            row("sage", 40.0, step_ms=6.0, error=0.001),
            row(
                "policy",
                policy_psnr_db,
                step_ms=policy_ms,
                error=0.002,
                predicted=(7.0, 0.25, 17.0),
            ),
        ),
        1.002,
        "clean",
        ("predicted for H100, and this is H200",),
    )


def untimed():
    """On a CPU."""
    rows = (row("sdpa", math.inf), row("sage", 40.0, error=0.001), row("policy", 45.0, error=0.001))
    return ClipComparison(rows, None, "", ())
