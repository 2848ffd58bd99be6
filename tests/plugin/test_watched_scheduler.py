"""A scheduler whose steps are watched: it stays what it is, and its copies are plain."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from sage_plugin.kernels.fallback import Fallback
from sage_plugin.plugin.steps.caller import schedulers_of
from sage_plugin.plugin.steps.scheduler import counts_steps
from sage_plugin.plugin.steps.tracker import StepTracker
from tests.plugin.samplers import ZERO, Denoiser, Sampler, places, sampler, whole


def test_the_scheduler_stays_what_it_is():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    before = inspect.signature(scheduler.step)
    pipeline = Sampler(Denoiser(), scheduler)
    tracker, other = StepTracker(pipeline), StepTracker(pipeline)
    assert isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
    assert type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    assert inspect.signature(scheduler.step) == before
    assert scheduler.config.shift == 3.0
    tracker.stop()
    assert type(scheduler) is not FlowMatchEulerDiscreteScheduler  # the other one counts
    other.stop()
    other.stop()
    assert type(scheduler) is FlowMatchEulerDiscreteScheduler
    assert not any("sage" in key for key in vars(scheduler))


@pytest.mark.parametrize(
    "way",
    [
        copy.deepcopy,
        copy.copy,
        lambda s: pickle.loads(pickle.dumps(s)),
        lambda s: type(s).from_config(s.config),
        lambda s: type(s)(),
    ],
)
def test_copies_of_a_watched_scheduler_are_plain(way):
    made, _ = sampler()
    made(3)
    other = way(made.scheduler)
    assert type(other) is DDIMScheduler
    assert not any("sage" in key for key in vars(other))
    made.scheduler.set_timesteps(3)
    other.set_timesteps(9)
    other.step(torch.zeros(1, 1, 2, 2), other.timesteps[0], torch.zeros(1, 1, 2, 2))
    assert places(made.loop(made.scheduler.timesteps, 1, True)) == [(0, 3)]


def test_a_saved_scheduler_is_the_original_one(tmp_path):
    pipeline = Sampler(Denoiser(), DDIMScheduler(beta_end=0.01))
    StepTracker(pipeline)
    pipeline.scheduler.save_pretrained(tmp_path)
    loaded = DDIMScheduler.from_pretrained(tmp_path)
    assert type(loaded) is DDIMScheduler
    assert loaded.config.beta_end == 0.01
    assert '"_class_name": "DDIMScheduler"' in (tmp_path / "scheduler_config.json").read_text()


def test_what_a_pipeline_restores_in_its_scheduler_counts():
    """MultiDiffusion takes one step for each view, from the same state of the scheduler."""
    made, _ = sampler()

    class Panorama(Sampler):
        def loop(self, timesteps, stop, advance):
            seen, kept = [], [copy.deepcopy(self.scheduler.__dict__)] * 2
            for t in timesteps:
                for view in range(2):
                    self.scheduler.__dict__.update(kept[view])
                    seen.append(self.unet(t))
                    self.scheduler.step(ZERO, t, ZERO)
                    kept[view] = copy.deepcopy(self.scheduler.__dict__)
            return seen

    assert places(Panorama(made.unet, made.scheduler)(4)) == whole(4, 2)


def test_an_exchanged_scheduler_is_watched_from_then_on():
    made, tracker = sampler()
    first = made.scheduler
    made.scheduler = UniPCMultistepScheduler.from_config(first.config)
    assert places(made(4)) == whole(4)
    tracker.stop()
    assert type(first) is DDIMScheduler
    assert type(made.scheduler) is UniPCMultistepScheduler


def test_one_that_is_exchanged_in_the_middle_of_a_run_tells_by_itself():
    made, _ = sampler()
    other = FlowMatchEulerDiscreteScheduler()
    other.set_timesteps(5)
    for t in other.timesteps[:2]:
        other.step(ZERO, t, ZERO)
    made.scheduler = other
    assert places(made.loop(other.timesteps[2:3], None, True)) == [(2, 5)]


def test_what_has_no_scheduler_counts_no_steps():
    assert set(schedulers_of(Sampler(None, DDIMScheduler()))) == {"scheduler"}
    assert schedulers_of(torch.nn.Linear(2, 2)) == {}
    assert schedulers_of(Sampler(None, object())) == {}
    assert counts_steps(DDIMScheduler())


def test_a_scheduler_that_is_equal_to_others_tells_nothing():
    """Such ones have no hash."""

    class Equal(DDIMScheduler):
        def __eq__(self, other):
            return True

    made = Sampler(Denoiser(), Equal())
    made.unet.tracker = StepTracker(made)
    assert type(made.scheduler) is Equal
    assert places(made(2)) == [Fallback.STEP_OUTSIDE_RUN] * 2


def test_a_scheduler_that_cannot_be_changed_tells_nothing():
    class Frozen:
        __slots__ = ("__weakref__", "timesteps")

        def step(self):
            """Needed to be a scheduler."""

        set_timesteps = step

    made = Sampler(Denoiser(), Frozen())
    made.unet.tracker = StepTracker(made)
    assert places(made.loop(torch.tensor([9.0]), 1, False)) == [Fallback.STEP_OUTSIDE_RUN]
