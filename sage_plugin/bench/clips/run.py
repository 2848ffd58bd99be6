"""A comparison of clips from beginning to end: draw each once, compare, time interleaved rounds."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from sage_plugin import device as devices
from sage_plugin.bench.clips.draw import Drawn, Frames, Subject, draw_once
from sage_plugin.bench.clips.latent_drift import LatentDrift
from sage_plugin.bench.clips.record import ClipComparison, ClipRow
from sage_plugin.bench.clips.rounds import LIMITS, Patched, time_runs
from sage_plugin.bench.clips.run_config import RunConfig, mismatches
from sage_plugin.bench.clips.stopwatch import RunTime
from sage_plugin.bench.forecast import duration
from sage_plugin.bench.rows import EMULATION_NOTE
from sage_plugin.demo.quality import check_installed, quality
from sage_plugin.errors import UsageError
from sage_plugin.measure.clocks import snapshot, stamp
from sage_plugin.measure.timing import TimingLimits
from sage_plugin.plugin.policy.rules import Policy

AGAIN = " again"
"""The baseline is timed twice under two names: the self-test of the timing."""


def compare_clips(
    subject: Subject,
    configs: Sequence[RunConfig],
    *,
    limits: TimingLimits = LIMITS,
    seed: int = 0,
    report_progress: Callable[[str], None] = lambda words: None,
    on_clip: Callable[[Mapping[str, Frames]], object] = lambda clips: None,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[ClipComparison, dict[str, Frames]]:
    """Draw one clip with several configs, and measure how far and how fast each is.

    Whole runs are timed on a GPU; emulated kernels never are.

    Args:
        subject: what is drawn.
        configs: the baseline first (`run_config.run_configs`).
        limits: when the timed rounds end.
        seed: of the order within the rounds.
        report_progress: called with a few words before each run.
        on_clip: called after each clip with all that are drawn, so that they can be kept.
        now: seconds of a steady clock.

    Returns:
        The comparison, and the clips by the name of their config.

    Raises:
        UsageError: the first config is not the baseline, or two have one name.
        ConfigError: the policy is not for this pipeline; nothing was drawn then.
        DeviceError: a clip does not fit into memory or holds NaN, or scikit-image is missing.
    """
    names = {config.name for config in configs}
    if not configs or not configs[0].is_baseline or len(names) != len(configs):
        raise UsageError("a comparison needs the baseline first, and a name of its own per config")
    check_installed()
    denoisers = subject.denoisers(configs)
    drawn, drift, to_go = dict[str, Drawn](), LatentDrift(), ""
    for count, config in enumerate(configs, start=1):
        report_progress(f"drawing with {config.name} ({count} of {len(configs)}){to_go}")
        start = now()
        drawn[config.name] = draw_once(subject, config, drift)
        left = (now() - start) * (len(configs) - count)
        to_go = f", {'at least' if count == 1 else 'about'} {duration(left)} to go"
        on_clip({name: one.frames for name, one in drawn.items()})
    times: dict[str, RunTime] = {}
    aa_ratio, mark = None, ""
    if subject.device.type != "cpu":
        baseline, before = configs[0].name, snapshot(subject.device)
        times = time_runs(
            subject,
            _patches(subject, [config for config in configs if not drawn[config.name].emulated]),
            denoisers,
            limits=limits,
            seed=seed,
            on_run=lambda name, number: report_progress(f"timing {name} (round {number})"),
            now=now,
        )
        aa_ratio = times[baseline + AGAIN].step_ms / times[baseline].step_ms
        mark = stamp(aa_ratio, before, snapshot(subject.device))
    policy = next((config.policy for config in configs if config.policy is not None), None)
    rows = tuple(
        _row(config, configs[0], policy, drawn, times, subject.device) for config in configs
    )
    notes = mismatches(
        None if policy is None else policy.prediction,
        device=devices.facts(subject.device).name,
        calls=rows[0].attention_calls,
    )
    clips = {name: one.frames for name, one in drawn.items()}
    return ClipComparison(rows, aa_ratio, mark, tuple(notes)), clips


def _patches(subject: Subject, configs: Sequence[RunConfig]) -> Mapping[str, Patched]:
    """What each timed run is patched with: nothing for the baseline, which runs twice a round."""
    baseline, *kernels = configs
    patches: dict[str, Patched] = {
        baseline.name: contextlib.nullcontext,
        baseline.name + AGAIN: contextlib.nullcontext,
    }
    return patches | {c.name: functools.partial(subject.patched, c) for c in kernels}


def _row(
    config: RunConfig,
    baseline: RunConfig,
    policy: Policy | None,
    drawn: Mapping[str, Drawn],
    times: Mapping[str, RunTime],
    device: torch.device,
) -> ClipRow:
    one, run_time = drawn[config.name], times.get(config.name)
    ours, theirs = config.predicted(policy), baseline.predicted(policy)
    return ClipRow(
        name=config.name,
        quality=quality(one.frames, drawn[baseline.name].frames),
        step_error=one.step_error,
        kernel_calls=one.report.kernel_calls(),
        attention_calls=one.report.total_calls(),
        ran=one.ran,
        time=run_time,
        saved_ms=None if run_time is None else times[baseline.name].run_ms - run_time.run_ms,
        predicted_ms=None if ours is None else ours.ms,
        predicted_error=None if ours is None else ours.error,
        predicted_saved_ms=None if ours is None or theirs is None else theirs.ms - ours.ms,
        note=EMULATION_NOTE if one.emulated or device.type == "cpu" else "",
    )
