"""Timed rounds on a fake clock: every config once per round, in an order drawn anew."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from sage_plugin.bench.clips.draw import Subject
from sage_plugin.bench.clips.rounds import time_runs
from sage_plugin.measure.timing import TimingLimits

STEP_S = {"sdpa": 0.010, "sage": 0.004}
LIMITS = TimingLimits(warmup=0, warmup_s=0.0, min_samples=6, max_samples=6, budget_s=1e9)


class Machine:
    """A pipeline whose steps take the time of the config that it is patched for."""

    def __init__(self):
        self.time, self.config, self.ran = 0.0, "", []
        self.denoiser = nn.Identity()

    @contextlib.contextmanager
    def patched(self, config):
        self.time += 5.0  # patching is not timed
        self.config = config
        yield
        self.config = ""

    def draw(self, on_step):
        self.ran.append(self.config)
        self.time += 1.0  # the text encoder is no part of a step
        for _ in range(3):
            self.denoiser(torch.ones(1))
            self.time += STEP_S[self.config]
            on_step(torch.ones(1))
        self.time += 2.0  # nor is the decoder

    def patches(self):
        return {name: lambda name=name: self.patched(name) for name in STEP_S}


def times(machine, **options):
    return time_runs(
        Subject(None, machine.draw, torch.device("cpu")),
        machine.patches(),
        [machine.denoiser],
        now=lambda: machine.time,
        **{"limits": LIMITS, **options},
    )


def test_steps_and_runs_of_each_way():
    machine = Machine()
    found = times(machine)
    assert found["sdpa"].step_ms == pytest.approx(10.0)
    assert found["sage"].step_ms == pytest.approx(4.0)
    assert found["sage"].steps_ms == pytest.approx((4.0, 4.0, 4.0))
    assert found["sage"].run_ms == pytest.approx(3012.0)
    assert found["sage"].runs == found["sdpa"].runs == 6
    assert not machine.denoiser._forward_pre_hooks


def test_rounds_are_interleaved_in_an_order_of_the_seed():
    first, again, other = Machine(), Machine(), Machine()
    times(first, seed=1)
    times(again, seed=1)
    times(other, seed=2)
    rounds = [tuple(first.ran[i : i + 2]) for i in range(0, 12, 2)]
    assert all(sorted(one) == ["sage", "sdpa"] for one in rounds)
    assert len(set(rounds)) == 2  # both orders occur
    assert first.ran == again.ran != other.ran


def test_the_budget_ends_the_rounds_after_two_at_least():
    machine = Machine()
    spent = TimingLimits(warmup=0, warmup_s=0.0, min_samples=6, max_samples=30, budget_s=0.5)
    assert times(machine, limits=spent)["sage"].runs == 2


def test_each_run_is_told():
    told = []
    times(Machine(), on_run=lambda name, number: told.append((name, number)))
    assert sorted(told) == sorted((name, n) for name in STEP_S for n in range(1, 7))
