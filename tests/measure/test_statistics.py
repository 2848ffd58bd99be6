"""Medians and gains: against scipy, by hand, and by simulation (D3, D8)."""

from __future__ import annotations

import math
import random

import pytest

from sage_plugin.measure import statistics
from sage_plugin.measure.statistics import gain_interval, median_interval
from sage_plugin.measure.timing import TimingLimits, interleave


def test_median_interval_by_hand():
    # P(Binomial(10, 1/2) <= 1) = 11/1024 is within 2.5 %, <= 2 is not: the 2nd and the 9th value.
    assert median_interval([10, 9, 8, 7, 6, 5, 4, 3, 2, 1]) == (5.5, 2, 9)


@pytest.mark.parametrize("n", [6, 7, 13, 30, 101])
def test_median_interval_covers_what_it_says(n):
    stats = pytest.importorskip("scipy.stats")
    _, low, high = median_interval(range(n))
    missed = 2 * stats.binom.cdf(low, n, 0.5)  # values below the interval's lower end, both sides
    assert high == n - 1 - low
    assert missed <= 0.05
    assert 2 * stats.binom.cdf(low + 1, n, 0.5) > 0.05


def test_one_sample_is_its_own_interval_and_none_is_refused():
    assert median_interval([3.0]) == (3.0, 3.0, 3.0)
    with pytest.raises(ValueError, match="no samples"):
        median_interval([])


@pytest.mark.parametrize("freedom", [1, 2, 3, 4])
def test_student_matches_scipy(freedom):
    stats = pytest.importorskip("scipy.stats")
    assert statistics._student(freedom, 0.95) == pytest.approx(
        stats.t.ppf(0.975, freedom), rel=1e-4
    )


@pytest.mark.parametrize(("n", "critical"), [(6, 0), (10, 8), (20, 52), (25, 89)])
def test_signed_rank_matches_the_printed_tables(n, critical):
    assert statistics._signed_rank(n, 0.95) == critical


def test_rank_approximation_joins_the_exact_count():
    assert abs(statistics._signed_rank(41, 0.95) - 279) <= 1


def test_gain_is_the_hodges_lehmann_estimate_of_paired_ratios():
    base, new = [2.0, 4.0, 8.0], [1.0, 2.0, 4.0]  # drift doubles the times, the ratio stays
    gain, low, high = gain_interval(base, new)
    assert gain == low == high == pytest.approx(0.5)


def test_gain_interval_of_five_pairs_is_students():
    stats = pytest.importorskip("scipy.stats")
    base, new = [1.0] * 5, [0.9, 0.91, 0.89, 0.92, 0.88]
    gain, low, high = gain_interval(base, new)
    logs = [math.log(x) for x in new]
    expected = stats.t.interval(0.95, 4, stats.tmean(logs), stats.sem(logs))
    assert gain == pytest.approx(1 - math.exp(stats.tmean(logs)))
    assert (low, high) == pytest.approx((1 - math.exp(expected[1]), 1 - math.exp(expected[0])))


def test_spikes_and_drift_do_not_move_the_gain():
    rng = random.Random(1)
    drift = [1 + i / 50 for i in range(50)]
    base = [d * (1 + 0.002 * rng.gauss(0, 1)) for d in drift]
    new = [0.95 * d * (1 + 0.002 * rng.gauss(0, 1)) for d in drift]
    new[7] *= 5
    gain, low, high = gain_interval(base, new)
    assert low < 0.05 < high
    assert gain == pytest.approx(0.05, abs=0.002)


@pytest.mark.parametrize(
    ("base", "new"), [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, 1.0], [1.0, 0.0])]
)
def test_gain_refuses_what_is_no_pair_of_times(base, new):
    with pytest.raises(ValueError, match="gain_interval"):
        gain_interval(base, new)


def noisy_round(seed, spread):
    rng = random.Random(f"noise {seed}")  # not the stream that draws the order
    return lambda order: [1.0 + spread * rng.gauss(0, 1) for _ in order]


@pytest.mark.parametrize("fields", [(3, 3, 0.0), (8, 8, 0.0), (40, 40, 0.0), (10, 40, 0.02)])
def test_d8_the_same_function_is_rarely_promoted_over_itself(fields):
    """Whether the rounds are as many as were asked for, or end at a precision."""
    promoted = 0
    for seed in range(200):
        limits = TimingLimits(0, 0.0, *fields[:2], precision=fields[2])
        ms = interleave(["a", "b"], noisy_round(seed, 0.02), limits=limits, seed=seed)
        promoted += gain_interval(ms["a"], ms["b"])[1] > 0
    assert promoted < 0.05 * 200


def test_d3_the_luckiest_of_many_does_not_survive_a_second_measurement():
    kept = 0
    for seed in range(200):
        rng = random.Random(seed)
        lucky = min(range(500), key=lambda _: rng.gauss(1, 0.02))
        limits = TimingLimits(warmup=0, warmup_s=0, min_samples=12, max_samples=12)
        names = ["incumbent", str(lucky)]
        ms = interleave(names, noisy_round(seed, 0.02), limits=limits, seed=seed)
        kept += gain_interval(ms["incumbent"], ms[str(lucky)])[1] <= 0
    assert kept >= 0.95 * 200


def test_few_pairs_claim_no_more_than_their_ranks_can():
    """Eight pairs that all agree are sure by 1 in 128 at best."""
    base, new = [1.0] * 8, [0.9 + 0.001 * i for i in range(8)]
    _, low, high = statistics.gain_interval(base, new, 0.99)
    assert (low, high) == (pytest.approx(0.093), pytest.approx(0.1))
    _, wide_low, wide_high = statistics.gain_interval(base, new, 0.9999)
    assert wide_low < 0.09
    assert wide_high > 0.101


def test_two_pairs_with_a_spike_are_sure_of_nothing():
    gain, low, high = gain_interval([2.66, 2.04], [51.8, 2.17], 0.99875)
    assert low == -math.inf
    assert -10 < gain < 0 < high < 1 or high == 1.0
