"""The line between single kernels, and the distance of a policy from it in dB."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_plugin.bench.clips.pareto import Point, gain_over_front, pareto_front

FAST, SLOW = Point("fav3_fp8", 1.0, 30.0), Point("sage", 2.0, 40.0)


def policy(ms, psnr_db):
    return Point("policy", ms, psnr_db)


@pytest.mark.parametrize(
    ("ms", "psnr_db", "gap"),
    [
        (1.5, 36.0, 1.0),  # above the middle of the line
        (1.5, 34.0, -1.0),
        (1.25, 32.5, 0.0),  # on it
        (0.5, 33.0, 3.0),  # faster than the fastest: against its PSNR
        (3.0, 39.0, -1.0),  # slower than the slowest: against its PSNR
        (1.0, 31.0, 1.0),
        (2.0, 41.0, 1.0),
    ],
)
def test_the_distance_from_a_line_of_two(ms, psnr_db, gap):
    assert gain_over_front(policy(ms, psnr_db), [SLOW, FAST]) == pytest.approx(gap)


def test_a_kernel_that_another_beats_in_both_is_no_corner():
    beaten = Point("fav3_sage", 1.5, 29.0)
    assert pareto_front([SLOW, beaten, FAST]) == (FAST, SLOW)
    assert gain_over_front(policy(1.5, 36.0), [SLOW, beaten, FAST]) == pytest.approx(1.0)
    later = Point("slower and worse", 9.0, 35.0)
    assert gain_over_front(policy(5.0, 40.0), [FAST, SLOW, later]) == pytest.approx(0.0)


def test_a_kernel_below_the_line_of_two_others_bends_it():
    middle = Point("fav3_sage", 1.5, 31.0)
    assert pareto_front([FAST, middle, SLOW]) == (FAST, middle, SLOW)
    assert gain_over_front(policy(1.75, 36.0), [FAST, middle, SLOW]) == pytest.approx(0.5)


def test_of_two_as_fast_the_better_one_counts():
    twin = Point("twin", 1.0, 28.0)
    assert pareto_front([twin, FAST]) == pareto_front([FAST, twin]) == (FAST,)


def test_the_hosts_clip_has_no_place_on_the_line():
    host = Point("sdpa", 4.0, math.inf)
    assert pareto_front([host, FAST]) == (FAST,)
    assert gain_over_front(policy(1.0, 30.0), [host]) is None
    assert gain_over_front(policy(1.0, 30.0), []) is None
    assert gain_over_front(policy(4.0, math.inf), [FAST]) == math.inf


POINTS = st.builds(
    Point,
    st.just("kernel"),
    st.floats(0.1, 100, allow_nan=False),
    st.floats(5, 90, allow_nan=False),
)


@given(st.lists(POINTS, min_size=1, max_size=8))
def test_corners_lie_on_the_line_and_all_kernels_on_it_or_below(kernels):
    corners = pareto_front(kernels)
    assert [p.ms for p in corners] == sorted({p.ms for p in corners})
    assert all(a.psnr_db < b.psnr_db for a, b in itertools.pairwise(corners))
    for corner in corners:
        assert gain_over_front(corner, kernels) == pytest.approx(0.0, abs=1e-6)
    for kernel in kernels:
        assert any(c.ms <= kernel.ms and c.psnr_db >= kernel.psnr_db for c in corners)


@given(st.lists(POINTS, min_size=1, max_size=8), POINTS, st.floats(0, 50))
def test_faster_or_better_is_never_further_below(kernels, one, gain):
    gap = gain_over_front(one, kernels)
    assert gain_over_front(Point("p", one.ms, one.psnr_db + gain), kernels) == pytest.approx(
        gap + gain
    )
    assert gain_over_front(Point("p", one.ms / (1 + gain), one.psnr_db), kernels) >= gap - 1e-9


@given(st.lists(POINTS, min_size=1, max_size=8), POINTS)
def test_order_does_not_matter(kernels, one):
    assert gain_over_front(one, kernels) == gain_over_front(one, kernels[::-1])
