"""The step of a pipeline, as its scheduler tells: guidance, two transformers, exchange, copies."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from sage_plugin.plugin.policy.step_counter import StepClock, counts_steps

SCHEDULERS = (
    "DDIMScheduler", "CogVideoXDDIMScheduler", "EulerDiscreteScheduler",
    "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler", "DPMSolverMultistepScheduler",
    "LCMScheduler", "PNDMScheduler",
)  # fmt: skip


class Pipeline:
    """A loop of denoising steps: what each forward sees of the clock."""

    def __init__(self, scheduler, forwards=1):
        self.scheduler, self.forwards = scheduler, forwards

    def __call__(self, clock, steps):
        self.scheduler.set_timesteps(steps)
        latents, seen = torch.zeros(1, 4, 2, 2), []
        for t in self.scheduler.timesteps:
            seen += [clock.now() for _ in range(self.forwards)]
            noise = torch.zeros_like(latents)
            latents = self.scheduler.step(noise, t, latents, return_dict=False)[0]
        return seen


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("forwards", [1, 2])
def test_every_forward_of_a_step_has_its_number_in_every_run(name, forwards):
    pipeline = Pipeline(getattr(diffusers, name)(), forwards)
    clock = StepClock(pipeline)
    for steps in (6, 4):
        seen = pipeline(clock, steps)
        total = len(pipeline.scheduler.timesteps)
        assert total >= steps
        assert seen == [(step, total) for step in range(total) for _ in range(forwards)]


def test_the_scheduler_stays_what_it_is():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    before = inspect.signature(scheduler.step)
    pipeline = Pipeline(scheduler)
    clock = StepClock(pipeline)
    assert isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
    assert type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    assert inspect.signature(scheduler.step) == before
    assert scheduler.config.shift == 3.0
    assert DDIMScheduler in [type(s) for s in scheduler.compatibles] or scheduler.compatibles
    clock.stop()
    assert type(scheduler) is FlowMatchEulerDiscreteScheduler
    assert not any("sage" in key for key in vars(scheduler))
    clock.stop()


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_of_a_watched_scheduler_are_plain(way):
    pipeline = Pipeline(DDIMScheduler())
    clock = StepClock(pipeline)
    pipeline(clock, 3)
    other = way(pipeline.scheduler)
    assert type(other) is DDIMScheduler
    assert not any("sage" in key for key in vars(other))
    other.set_timesteps(9)
    other.step(torch.zeros(1, 1, 2, 2), other.timesteps[0], torch.zeros(1, 1, 2, 2))
    assert clock.now() == (3, 3)


def test_a_saved_scheduler_is_the_original_one(tmp_path):
    pipeline = Pipeline(DDIMScheduler(beta_end=0.01))
    StepClock(pipeline)
    pipeline.scheduler.save_pretrained(tmp_path)
    loaded = DDIMScheduler.from_pretrained(tmp_path)
    assert type(loaded) is DDIMScheduler
    assert loaded.config.beta_end == 0.01
    assert '"_class_name": "DDIMScheduler"' in (tmp_path / "scheduler_config.json").read_text()


def test_an_exchanged_scheduler_is_watched_from_then_on():
    pipeline = Pipeline(DDIMScheduler())
    clock = StepClock(pipeline)
    first = pipeline.scheduler
    pipeline.scheduler = UniPCMultistepScheduler.from_config(first.config)
    assert pipeline(clock, 4) == [(step, 4) for step in range(4)]
    clock.stop()
    assert type(first) is DDIMScheduler
    assert type(pipeline.scheduler) is UniPCMultistepScheduler


def test_one_that_is_exchanged_in_the_middle_of_a_run_tells_by_itself():
    pipeline = Pipeline(DDIMScheduler())
    clock = StepClock(pipeline)
    other = FlowMatchEulerDiscreteScheduler()
    other.set_timesteps(5)
    x = torch.zeros(1, 4, 2, 2)
    for t in other.timesteps[:2]:
        other.step(x, t, x)
    pipeline.scheduler = other
    assert clock.now() == (2, 5)


def test_a_pipeline_that_is_gone_has_no_steps():
    pipeline = Pipeline(DDIMScheduler())
    clock = StepClock(pipeline)
    del pipeline
    assert clock.now() == (0, None)


def test_what_has_no_scheduler_counts_no_steps():
    assert counts_steps(Pipeline(DDIMScheduler()))
    assert not counts_steps(torch.nn.Linear(2, 2))
    assert not counts_steps(Pipeline(object()))
