"""What a proof comes to in words, and its curves as bars."""

from __future__ import annotations

import math

import pytest

from sage_plugin.bench.clips.record import ClipComparison
from sage_plugin.bench.clips.summary import BARS, bars, largest_error, verdict, worst_step
from tests.bench.clips.comparisons import row, timed, untimed


@pytest.mark.parametrize(
    ("psnr_db", "said"),
    [
        (36.2, "The policy lies 1.2 dB above the front of single kernels."),
        (33.5, "The policy lies 1.5 dB below the front of single kernels."),
        (35.0, "The policy lies 0.0 dB above the front of single kernels."),
        (math.inf, "The policy draws the baseline's own clip, to the bit."),
    ],
)
def test_the_verdict(psnr_db, said):
    assert verdict(timed(psnr_db)) == said


def test_the_verdict_where_there_is_none():
    assert "kernels are emulated on a CPU" in verdict(untimed())
    alone = ClipComparison((timed().rows[0], timed().rows[-1]), 1.0, "clean", ())
    assert verdict(alone).startswith("No single kernel has a place")
    assert (
        verdict(ClipComparison(timed().rows[:3], 1.0, "clean", ())) == "No policy was drawn with."
    )


def test_bars_are_logarithmic():
    assert bars([1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-9, 0.0], 1.0) == "█▆▅▃▁▁▁"
    assert bars([0.0, 0.0], 0.0) == BARS[0] * 2
    assert bars([math.nan, math.inf], 1.0) == "▁█"


def test_the_largest_error_of_all_ways():
    assert largest_error(timed()) == pytest.approx(0.08)
    assert largest_error(ClipComparison((), None, "", ())) == 0.0
    endless = ClipComparison((row("sage", 30.0, error=math.inf),), None, "", ())
    assert largest_error(endless) == 0.0


@pytest.mark.parametrize(
    ("drift", "step"),
    [((0.3, 0.4, 0.5), 0), ((0.0, 0.1, 0.5, 0.6), 2), ((0.0, 0.0), None), ((), None)],
)
def test_the_step_in_which_most_error_comes_in(drift, step):
    assert worst_step(drift) == step
