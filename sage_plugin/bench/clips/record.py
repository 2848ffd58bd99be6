"""The records of a proof: one row a way of running, and all of them."""

from __future__ import annotations

from dataclasses import dataclass

from sage_plugin.bench.clips.pareto import Point, above
from sage_plugin.bench.clips.run_config import POLICY
from sage_plugin.bench.clips.stopwatch import RunTime
from sage_plugin.demo.quality import Quality
from sage_plugin.schema import JsonRecord


@dataclass(frozen=True, slots=True)
class ClipRow(JsonRecord):
    """One way of running.

    Attributes:
        name: a kernel, the host's name, or `policy`.
        quality: of its clip against the host's.
        step_error: relative L2 distance of the latents from the host's at the end of each step.
        kernel_calls: attention calls that ran on a kernel.
        attention_calls: all attention calls of the run.
        ran: calls by what they ran on: `kernel:variant`, or why on the host's attention.
        time: of whole runs; `None` where none were timed.
        saved_ms: time of the host's run less that of this one.
        foreseen_ms: what the policy's search foresaw for all attention calls of the run.
        foreseen_error: likewise for their mean error.
        foreseen_saved_ms: foreseen time of the host's attention calls less that of these.
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
    foreseen_ms: float | None
    foreseen_error: float | None
    foreseen_saved_ms: float | None
    note: str

    @property
    def point(self) -> Point | None:
        """Its place in the plane of time and PSNR, `None` where it was not timed."""
        if self.time is None:
            return None
        return Point(self.name, self.time.step_ms, self.quality.mean_psnr_db)


@dataclass(frozen=True, slots=True)
class Proof(JsonRecord):
    """All ways of running one clip.

    Attributes:
        rows: the host's attention first, then the kernels, and the policy last.
        aa_ratio: the host's step timed twice: one median over the other; `None` where not timed.
        stamp: `clean`, `noisy` or `throttled`; empty where nothing was timed.
        notes: sentences on what keeps foreseen and real from being compared.
    """

    rows: tuple[ClipRow, ...]
    aa_ratio: float | None
    stamp: str
    notes: tuple[str, ...]

    def of(self, name: str) -> ClipRow | None:
        """The row of a way, `None` where there is none."""
        return next((row for row in self.rows if row.name == name), None)

    @property
    def kernel_points(self) -> tuple[Point, ...]:
        """The single kernels in the plane of time and PSNR."""
        rows = (row for row in self.rows[1:] if row.name != POLICY)
        return tuple(point for row in rows if (point := row.point) is not None)

    @property
    def above_line_db(self) -> float | None:
        """How far the policy lies above the line between the kernels, negative where below.

        `None` where there is no line, or no policy on it.
        """
        policy = self.of(POLICY)
        point = None if policy is None else policy.point
        return None if point is None else above(point, self.kernel_points)
