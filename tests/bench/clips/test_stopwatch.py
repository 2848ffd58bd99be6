"""Times of steps and runs from marks of a fake clock."""

from __future__ import annotations

import pytest

from sage_plugin.bench.clips.stopwatch import Stopwatch, run_time
from sage_plugin.errors import UsageError


def watch_of(begin, first, ends, stop, waits=None):
    """A stopped watch with its marks at these seconds; `first` may be `None`."""
    marks = [begin, *([] if first is None else [first]), *ends, stop]
    ticks = iter(marks)
    watch = Stopwatch(
        wait=lambda: None if waits is None else waits.append(1), now=lambda: next(ticks)
    )
    watch.start()
    if first is not None:
        watch.mark_first_forward()
        watch.mark_first_forward()  # only the first call of the denoiser begins a step
    for _ in ends:
        watch.mark_step()
    watch.stop()
    return watch


def test_the_first_step_begins_with_the_denoiser():
    watch = watch_of(10.0, 10.5, [10.6, 10.9], 12.0)
    assert watch.steps_ms == pytest.approx((100.0, 300.0))
    assert watch.run_ms == pytest.approx(2000.0)


def test_without_a_denoiser_the_first_step_begins_with_the_run():
    assert watch_of(1.0, None, [1.25, 1.5], 2.0).steps_ms == pytest.approx((250.0, 250.0))


def test_every_mark_waits_for_the_device():
    waits = []
    watch_of(0.0, 0.1, [0.2, 0.3], 0.4, waits)
    assert len(waits) == 5


def test_steps_that_differ_all_count():
    """A policy with slow first steps: their median would be 1 ms, and hide them."""
    runs = [watch_of(0.0, 0.0, [0.009, 0.010, 0.011], 0.1) for _ in range(3)]
    found = run_time(runs)
    assert found.step_ms == pytest.approx(11 / 3)
    assert found.steps_ms == pytest.approx((9.0, 1.0, 1.0))
    assert (found.run_ms, found.runs) == (pytest.approx(100.0), 3)


def test_the_median_of_the_runs_and_its_interval():
    runs = [watch_of(0.0, 0.0, [second], 2 * second) for second in (0.01, 0.05, 0.02)]
    found = run_time(runs)
    assert (found.step_low_ms, found.step_ms, found.step_high_ms) == pytest.approx((10, 20, 50))
    assert (found.run_low_ms, found.run_ms, found.run_high_ms) == pytest.approx((20, 40, 100))


def test_runs_without_steps_or_of_two_lengths_are_refused():
    with pytest.raises(UsageError, match="reported the end of no denoising step"):
        run_time([watch_of(0.0, 0.1, [], 0.2)])
    with pytest.raises(UsageError, match="different numbers of denoising steps"):
        run_time([watch_of(0.0, 0.1, [0.2], 0.2), watch_of(0.0, 0.1, [0.2, 0.3], 0.4)])
