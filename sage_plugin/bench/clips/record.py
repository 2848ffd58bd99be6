"""The records of a comparison of clips: one row per run config, and all of them, also as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sage_plugin.bench.clips.pareto import Point, gain_over_front
from sage_plugin.bench.clips.run_config import POLICY
from sage_plugin.bench.clips.stopwatch import RunTime
from sage_plugin.bench.report import finite
from sage_plugin.demo.quality import Quality
from sage_plugin.schema import JsonRecord

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class ClipRow(JsonRecord):
    """The clip of one run config.

    Attributes:
        name: a kernel, the baseline's name, or `policy`.
        quality: of its clip against the baseline's.
        step_error: relative L2 distance of the latents from the baseline's at the end of each step.
        kernel_calls: attention calls that ran on a kernel.
        attention_calls: all attention calls of the run.
        ran: calls by what they ran on: `kernel:variant`, or why they fell back.
        time: of whole runs; `None` if none were timed.
        saved_ms: time of the baseline's run less that of this one.
        predicted_ms: what the policy's search predicted for all attention calls of the run.
        predicted_error: predicted mean error of those calls.
        predicted_saved_ms: predicted time of the baseline's attention calls less that of these.
        note: what forbids to read its time as speed, or empty.
    """

    name: str
    quality: Quality
    step_error: tuple[float, ...]
    kernel_calls: int
    attention_calls: int
    ran: dict[str, int]
    time: RunTime | None
    saved_ms: float | None
    predicted_ms: float | None
    predicted_error: float | None
    predicted_saved_ms: float | None
    note: str

    @property
    def point(self) -> Point | None:
        """Its place in the plane of time and PSNR, `None` if it was not timed."""
        if self.time is None:
            return None
        return Point(self.name, self.time.step_ms, self.quality.mean_psnr_db)


@dataclass(frozen=True, slots=True)
class ClipComparison(JsonRecord):
    """One clip on all run configs.

    Attributes:
        rows: the baseline first, then the kernels, and the policy last.
        aa_ratio: the baseline's step timed twice: one median over the other; `None` if not timed.
        stamp: `clean`, `noisy` or `throttled`; empty if nothing was timed.
        notes: sentences on what keeps predicted and real numbers from being compared.
    """

    rows: tuple[ClipRow, ...]
    aa_ratio: float | None
    stamp: str
    notes: tuple[str, ...]

    def of(self, name: str) -> ClipRow | None:
        """Return the row of a config, `None` if there is none."""
        return next((row for row in self.rows if row.name == name), None)

    @property
    def kernel_points(self) -> tuple[Point, ...]:
        """The single kernels in the plane of time and PSNR."""
        rows = (row for row in self.rows[1:] if row.name != POLICY)
        return tuple(point for row in rows if (point := row.point) is not None)

    @property
    def gain_over_front_db(self) -> float | None:
        """How far the policy lies above the front of the kernels, negative below it.

        `None` if there is no front, or no policy.
        """
        policy = self.of(POLICY)
        point = None if policy is None else policy.point
        return None if point is None else gain_over_front(point, self.kernel_points)


def json_text(comparison: ClipComparison, facts: Mapping[str, Any]) -> str:
    """Write a comparison as one JSON object; equal clips have the PSNR `"inf"`."""
    whole = {
        "schema_version": SCHEMA_VERSION,
        **facts,
        "gain_over_front_db": comparison.gain_over_front_db,
        **comparison.to_json(),
        "rows": [row.to_json() | row.quality.summary() for row in comparison.rows],
    }
    return json.dumps(finite(whole, str), indent=1, allow_nan=False) + "\n"
