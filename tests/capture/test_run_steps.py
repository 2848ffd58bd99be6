"""Denoising steps and runs from the timesteps of forwards."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDIMScheduler, HeunDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sage_plugin.capture.recording.run_steps import RunSteps
from sage_plugin.plugin.steps.forward import Forward, Timestep

MODEL = nn.Linear(1, 1)


def counted(timesteps):
    """The steps of some forwards, and the counter."""
    steps = RunSteps()
    seen = []
    for timestep in timesteps:
        steps.forward(Forward(MODEL, 0, Timestep(timestep)))
        seen.append(steps.step)
    return seen, steps


FALLING = st.lists(st.floats(-1000, 1000, allow_nan=False), min_size=2, max_size=12, unique=True)


@given(
    timesteps=FALLING,
    forwards=st.integers(1, 3),
    runs=st.integers(1, 4),
    rising=st.booleans(),
)
def test_steps_and_runs_whatever_guidance_and_the_direction(timesteps, forwards, runs, rising):
    run = [t for t in sorted(timesteps, reverse=not rising) for _ in range(forwards)]
    seen, steps = counted(run * runs)
    assert seen == [i // forwards for i in range(len(run))] * runs
    assert (steps.steps, steps.runs) == (len(timesteps), runs)


def test_before_the_first_forward_nothing_is_known():
    steps = RunSteps()
    assert (steps.step, steps.steps, steps.runs) == (None, None, 0)


def test_a_model_without_timesteps_has_no_steps_and_no_runs():
    seen, steps = counted([None] * 5)
    assert seen == [None] * 5
    assert (steps.steps, steps.runs) == (None, 0)


def test_the_longest_run_is_reported():
    _, steps = counted([9.0, 5.0, 9.0, 7.0, 5.0, 3.0, 9.0, 5.0])
    assert (steps.steps, steps.runs, steps.step) == (4, 3, 1)


def test_a_forward_without_timestep_belongs_to_the_current_step():
    """A text encoder that is watched too, between two runs and within one."""
    seen, steps = counted([None, 999.0, None, 500.0, None, 999.0])
    assert seen == [None, 0, 0, 1, 1, 0]
    assert (steps.steps, steps.runs) == (2, 2)


@pytest.mark.parametrize("start", [900.0, 1.0])
def test_a_single_forward_is_one_step_of_one_run(start):
    seen, steps = counted([start])
    assert (seen, steps.steps, steps.runs) == ([0], 1, 1)


def test_strength_below_one_begins_anywhere():
    """An image-to-image run begins below the last timestep of the run before: it turns back."""
    seen, steps = counted([900.0, 500.0, 100.0, 600.0, 100.0])
    assert seen == [0, 1, 2, 0, 1]
    assert steps.runs == 2


class Sampling:
    """Runs a model as pipelines do."""

    def __init__(self, scheduler):
        self.unet, self.scheduler = MODEL, scheduler

    def __call__(self, steps, count, begin=0):
        self.scheduler.set_timesteps(count)
        seen, x = [], torch.zeros(1, 1, 2, 2)
        for t in self.scheduler.timesteps[begin:]:
            steps.forward(Forward(MODEL, 0, Timestep(t)))
            seen.append(steps.step)
            self.scheduler.step(torch.zeros_like(x), t, x)
        return seen


def test_steps_are_the_schedulers_where_one_counts():
    """Heun visits timesteps twice, and a policy counts both."""
    steps, sampling = RunSteps(), Sampling(HeunDiscreteScheduler())
    assert sampling(steps, 4) == list(range(7))
    assert (steps.steps, steps.runs) == (7, 1)


def test_a_run_that_goes_on_below_the_last_one_is_a_run_of_its_own():
    """As image-to-image of few steps after a run that was stopped; timesteps cannot tell."""
    steps, sampling = RunSteps(), Sampling(DDIMScheduler())
    steps.follow(sampling)
    sampling.scheduler.set_timesteps(4)
    first = sampling.scheduler.timesteps[0]
    steps.forward(Forward(MODEL, 0, Timestep(first + 9.0)))  # nobody's: by its timestep
    assert sampling(steps, 4) == [0, 1, 2, 3]
    assert sampling(steps, 4, begin=3) == [0]
    assert (steps.steps, steps.runs) == (4, 3)
    steps.tracker.stop()
    assert type(sampling.scheduler) is DDIMScheduler
