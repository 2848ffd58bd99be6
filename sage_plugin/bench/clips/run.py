"""A proof from beginning to end: draw each clip once, compare, then time interleaved rounds."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sage_plugin import device as devices
from sage_plugin.bench.clips import prediction as foresight
from sage_plugin.bench.clips.draw import Draw, Drawn, Frames, draw_once
from sage_plugin.bench.clips.latent_drift import Curve
from sage_plugin.bench.clips.record import ClipRow, Proof
from sage_plugin.bench.clips.rounds import LIMITS, Patched, time_runs
from sage_plugin.bench.clips.run_config import Way
from sage_plugin.bench.clips.stopwatch import RunTime
from sage_plugin.bench.rows import EMULATION_NOTE
from sage_plugin.demo.quality import check_installed, quality
from sage_plugin.errors import UsageError
from sage_plugin.measure.clocks import snapshot, stamp
from sage_plugin.measure.timing import TimingLimits
from sage_plugin.plugin.patch import MIN_SEQ, PatchHandle
from sage_plugin.plugin.policy.rules import Policy

AGAIN = " again"
"""The host's attention is timed twice under two names: the self-test of the timing."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is drawn.

    Attributes:
        pipe: a pipeline, not patched.
        draw: draws one clip with it, the same each time.
        device: where it runs.
        min_seq: as `patch` takes it.
        config_dir: as `patch` takes it.
    """

    pipe: object
    draw: Draw
    device: torch.device
    min_seq: int = MIN_SEQ
    config_dir: str | os.PathLike[str] | None = None

    def patched(self, way: Way) -> contextlib.AbstractContextManager[PatchHandle]:
        """The pipeline running one way; errors are those of `patch`."""
        return way.patched(self.pipe, min_seq=self.min_seq, config_dir=self.config_dir)

    def denoisers(self, ways: Sequence[Way]) -> list[nn.Module]:
        """The modules that are patched; all ways are tried on them, and nothing is drawn.

        Raises:
            ConfigError: a policy is not for this pipeline.
        """
        found: list[nn.Module] = []
        for way in ways:
            with self.patched(way) as handle:
                found = list(handle.components.values())
        return found


def prove(
    subject: Subject,
    ways: Sequence[Way],
    *,
    timed: bool = True,
    limits: TimingLimits = LIMITS,
    seed: int = 0,
    tell: Callable[[str], None] = lambda words: None,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[Proof, dict[str, Frames]]:
    """Draw one clip in several ways, and measure how far and how fast each is.

    Args:
        subject: what is drawn.
        ways: the host's attention first (`way.ways`).
        timed: time whole runs too; emulated kernels never are, and nothing is on a CPU.
        limits: when the timed rounds end.
        seed: of the order within the rounds.
        tell: told a few words before each run.
        now: seconds of a steady clock.

    Returns:
        The proof, and the clips by the name of their way.

    Raises:
        UsageError: the first way is not the host's attention, or two have one name.
        ConfigError: the policy is not for this pipeline; nothing was drawn then.
        DeviceError: a clip does not fit into memory or holds NaN, or scikit-image is missing.
    """
    if not ways or not ways[0].of_the_host or len({way.name for way in ways}) != len(ways):
        raise UsageError("a proof needs the host's attention first, and a name of its own a way")
    check_installed()
    denoisers = subject.denoisers(ways)
    drawn = _draw_all(subject, ways, tell)
    times: dict[str, RunTime] = {}
    aa_ratio, mark = None, ""
    if timed and subject.device.type != "cpu":
        host, before = ways[0].name, snapshot(subject.device)
        times = time_runs(
            subject.draw,
            _patches(subject, [way for way in ways if not drawn[way.name].emulated]),
            denoisers,
            device=subject.device,
            limits=limits,
            seed=seed,
            on_run=lambda name, number: tell(f"timing {name} (round {number})"),
            now=now,
        )
        aa_ratio = times[host + AGAIN].step_ms / times[host].step_ms
        mark = stamp(aa_ratio, before, snapshot(subject.device))
    rows = tuple(_row(way, ways, drawn, times, subject.device) for way in ways)
    policy = _policy_of(ways)
    notes = foresight.mismatches(
        None if policy is None else policy.prediction,
        device=devices.facts(subject.device).name,
        calls=rows[0].attention_calls,
    )
    clips = {name: one.frames for name, one in drawn.items()}
    return Proof(rows, aa_ratio, mark, tuple(notes)), clips


def _draw_all(
    subject: Subject, ways: Sequence[Way], tell: Callable[[str], None]
) -> dict[str, Drawn]:
    curve, drawn = Curve(), {}
    for count, way in enumerate(ways, start=1):
        title = way.name if count > 1 else "the host's attention"
        tell(f"drawing with {title} ({count} of {len(ways)})")
        with subject.patched(way) as handle:
            drawn[way.name] = draw_once(subject.draw, way, curve, handle.report)
    return drawn


def _patches(subject: Subject, ways: Sequence[Way]) -> Mapping[str, Patched]:
    """What each timed run is patched with: the host's with nothing, which runs twice a round."""
    host, *others = ways
    patches: dict[str, Patched] = {
        host.name: contextlib.nullcontext,
        host.name + AGAIN: contextlib.nullcontext,
    }
    return patches | {way.name: functools.partial(subject.patched, way) for way in others}


def _row(
    way: Way,
    ways: Sequence[Way],
    drawn: Mapping[str, Drawn],
    times: Mapping[str, RunTime],
    device: torch.device,
) -> ClipRow:
    host, policy = ways[0], _policy_of(ways)
    one, time_of = drawn[way.name], times.get(way.name)
    foreseen_ms, foreseen_error = foresight.parts(way.foreseen(policy))
    return ClipRow(
        name=way.name,
        quality=quality(one.frames, drawn[host.name].frames),
        step_error=one.step_error,
        kernel_calls=one.report.kernel_calls(),
        attention_calls=one.report.total_calls(),
        ran=one.ran,
        time=time_of,
        saved_ms=None if time_of is None else times[host.name].run_ms - time_of.run_ms,
        foreseen_ms=foreseen_ms,
        foreseen_error=foreseen_error,
        foreseen_saved_ms=foresight.foreseen_saving(way, host, policy),
        note=EMULATION_NOTE if one.emulated or device.type == "cpu" else "",
    )


def _policy_of(ways: Sequence[Way]) -> Policy | None:
    return next((way.policy for way in ways if way.policy is not None), None)
