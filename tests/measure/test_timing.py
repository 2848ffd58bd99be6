"""Interleaving, limits and methods, with scripted clocks (D1, D5) and a real CPU."""

from __future__ import annotations

import math
import random

import pytest
import torch

from sage_plugin.errors import DeviceError, UsageError
from sage_plugin.measure import timers
from sage_plugin.measure.timing import Samples, TimingLimits, interleave, measure


class FakeDevice:
    """A clock that moves by the times that it hands out, on a chip that warms up slowly."""

    def __init__(self, base, *, ramp=0.0, noise=0.0, seed=0):
        self.base, self.ramp, self.noise = base, ramp, noise
        self.rng = random.Random(seed)
        self.elapsed_s = 0.0
        self.orders = []

    def __call__(self, order):
        self.orders.append(list(order))
        times = []
        for name in order:
            cold = 1 + self.ramp * math.exp(-self.elapsed_s / 0.05)
            ms = self.base[name] * cold * (1 + self.noise * self.rng.gauss(0, 1))
            self.elapsed_s += ms / 1000
            times.append(ms)
        return times

    def now(self):
        return self.elapsed_s


def median_of(ms):
    return sorted(ms)[len(ms) // 2]


@pytest.mark.parametrize("order", [["a", "b", "c"], ["c", "b", "a"]])
def test_d1_a_clock_ramp_does_not_punish_the_early_ones(order):
    device = FakeDevice({"a": 1.0, "b": 1.01, "c": 1.02}, ramp=0.3)
    limits = TimingLimits(warmup=0, warmup_s=0, min_samples=30, max_samples=30)
    ms = interleave(order, device, limits=limits, now=device.now)
    assert min(ms, key=lambda name: median_of(ms[name])) == "a"


def test_each_round_has_every_function_once_in_a_seeded_random_order():
    devices = [FakeDevice({"a": 1.0, "b": 1.0, "c": 1.0}) for _ in range(3)]
    limits = TimingLimits(warmup=2, warmup_s=0, min_samples=20, max_samples=20)
    for device, seed in zip(devices, (5, 5, 6), strict=True):
        interleave(["a", "b", "c"], device, limits=limits, seed=seed, now=device.now)
    first, again, other = (device.orders for device in devices)
    assert first == again != other
    assert all(sorted(order) == ["a", "b", "c"] for order in first)
    assert len({tuple(order) for order in first}) > 3
    assert len(first) == 22


def test_warm_up_lasts_its_time_and_is_thrown_away():
    device = FakeDevice({"a": 1.0}, ramp=1.0)
    limits = TimingLimits(warmup=1, warmup_s=0.3, min_samples=5, max_samples=400)
    ms = interleave(["a"], device, limits=limits, now=device.now)
    assert max(ms["a"]) < 1.01


def test_d5_pure_noise_stops_at_the_cap_of_samples():
    device = FakeDevice({"a": 1.0}, noise=0.3)
    limits = TimingLimits(warmup=0, warmup_s=0, min_samples=5, max_samples=60, budget_s=1e9)
    assert len(interleave(["a"], device, limits=limits, now=device.now)["a"]) == 60


def test_d5_pure_noise_stops_at_the_budget():
    device = FakeDevice({"a": 10.0, "b": 10.0}, noise=0.3)
    limits = TimingLimits(warmup_s=0.2, max_samples=10**6, budget_s=1.0)
    interleave(["a", "b"], device, limits=limits, now=device.now)
    assert device.elapsed_s < 1.1


def test_a_slow_function_is_measured_twice_and_warmed_up_once():
    device = FakeDevice({"a": 60_000.0})
    ms = interleave(["a"], device, limits=TimingLimits(), now=device.now)
    assert len(ms["a"]) == 2
    assert len(device.orders) == 3


def test_steady_times_end_early():
    device = FakeDevice({"a": 1.0})
    ms = interleave(["a"], device, limits=TimingLimits(min_samples=7), now=device.now)
    assert len(ms["a"]) == 7


def test_samples_of_two_methods_are_never_compared():
    base = Samples("base", (1.0, 1.0), "events")
    with pytest.raises(ValueError, match="two methods are never compared"):
        Samples("new", (1.0, 1.0), "graph").gain_over(base)
    assert Samples("new", (0.5, 0.5), "events").gain_over(base)[0] == pytest.approx(0.5)


def test_timing_carries_its_method_and_count():
    timing = Samples("a", (3.0, 1.0, 2.0), "wall").timing()
    assert (timing.median_ms, timing.low_ms, timing.high_ms) == (2.0, 1.0, 3.0)
    assert (timing.n, timing.method) == (3, "wall")


def test_measure_on_a_cpu():
    x = torch.ones(64, 64)
    samples = measure(
        {"small": lambda: x @ x, "large": lambda: [x @ x for _ in range(50)]},
        device="cpu",
        min_samples=5,
        max_samples=5,
        warmup=1,
        budget_s=1.0,
    )
    assert samples["small"].method == "wall"
    assert len(samples["small"].ms) == len(samples["large"].ms) == 5
    assert min(samples["small"].ms) < min(samples["large"].ms)


@pytest.mark.parametrize("method", ["events", "graph", "profiler", "sundial"])
def test_methods_that_a_cpu_has_not_are_refused(method):
    with pytest.raises(UsageError, match="allowed are wall"):
        measure({"a": int}, device="cpu", method=method)


def test_measure_refuses_nothing_to_do_and_impossible_limits():
    with pytest.raises(UsageError, match="no function"):
        measure({}, device="cpu")
    with pytest.raises(UsageError, match="max_samples=1"):
        measure({"a": int}, device="cpu", max_samples=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
def test_measure_without_a_gpu_is_a_device_error():
    with pytest.raises(DeviceError, match="no GPU"):
        measure({"a": int}, device="cuda")


def test_an_error_of_a_function_is_not_hidden():
    def broken():
        raise RuntimeError("illegal memory access")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure({"a": broken}, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("method", timers.METHODS)
def test_methods_agree_on_a_long_memory_bound_call(method):
    x = torch.ones(2**27, device="cuda")
    samples = measure({"copy": x.clone}, device="cuda", method=method, budget_s=2.0)
    timing = samples["copy"].timing()
    gb_per_s = 2 * x.numel() * 4 / timing.median_ms * 1e-6
    assert timing.method == method
    assert 50 < gb_per_s < 8000  # other tests may share the GPU; a wrong unit is a thousand off


@pytest.mark.gpu
def test_d2_a_graph_finds_l2_as_cold_as_events_do():
    x = torch.ones(2**22, device="cuda")  # 16 MiB, fits L2
    calls = {"sum": lambda: x.sum()}
    found = {
        (method, cold): measure(
            calls, device="cuda", method=method, cold_l2=cold, budget_s=2.0, max_samples=100
        )["sum"].timing()
        for method in ("events", "graph")
        for cold in (True, False)
    }
    cold = [found[method, True].median_ms for method in ("events", "graph")]
    assert found["graph", False].method == "graph/warm"
    assert found["graph", False].median_ms < 0.95 * found["graph", True].median_ms
    assert 0.5 < cold[0] / cold[1] < 2


@pytest.mark.gpu
def test_a_call_of_many_launches_is_not_timed_by_its_host():
    x = torch.ones(256, device="cuda")

    def many():
        for _ in range(50):
            x.add(1.0)

    found = {
        method: measure({"many": many}, device="cuda", method=method, budget_s=2.0, max_samples=50)
        for method in ("events", "graph", "wall")
    }
    ms = {method: samples["many"].timing().median_ms for method, samples in found.items()}
    # How much less depends on how busy the host is; in a graph it has no part.
    assert ms["events"] < ms["wall"]
    assert ms["graph"] < ms["wall"]


def test_who_is_dropped_is_timed_no_more_and_nobody_ends_the_measurement():
    device = FakeDevice({"a": 1.0, "b": 2.0, "c": 3.0})
    asked = []

    def keep(ms):
        taken = len(ms["a"])
        asked.append(taken)
        return () if taken == 7 else [n for n in ms if n != "c" or taken < 2]

    limits = TimingLimits(0, 0.0, 50, 50)
    ms = interleave(["a", "b", "c"], device, limits=limits, now=device.now, keep=keep)
    assert {name: len(taken) for name, taken in ms.items()} == {"a": 7, "b": 7, "c": 2}
    assert asked == [*range(1, 8)]
    assert all({*order} == {"a", "b"} for order in device.orders[2:])
