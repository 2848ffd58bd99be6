"""The denoising step of a model: which scheduler counts, for whom, and when it cannot be known."""

from __future__ import annotations

import copy
import functools
import threading
import weakref

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from torch import nn

from sage_plugin.kernels.fallback import Fallback
from sage_plugin.plugin.steps.tracker import MOST_CALLS_OF_A_STEP, StepTracker
from tests.plugin.samplers import ZERO, Announcing, Denoiser, Sampler, places, sampler, whole

SCHEDULERS = (
    "DDIMScheduler", "CogVideoXDDIMScheduler", "EulerDiscreteScheduler",
    "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler", "DPMSolverMultistepScheduler",
    "LCMScheduler", "PNDMScheduler", "HeunDiscreteScheduler", "KDPM2DiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler", "DDPMScheduler",
)  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("eager", [True, False])
def test_every_forward_of_a_step_has_its_number_in_every_run(name, forwards, eager):
    made, tracker = sampler(name, forwards=forwards)
    made.unet.eager = eager
    runs, passed = set(), 0
    for steps in (6, 4):
        seen = made(steps)
        total = len(made.scheduler.timesteps)
        assert total >= steps
        assert places(seen) == whole(total, forwards)
        passed += total
        runs |= {step.run for step in seen}
    assert len(runs) == 2
    assert tracker.passed == passed


@pytest.mark.parametrize("name", [n for n in SCHEDULERS if n != "PNDMScheduler"])
@pytest.mark.parametrize("kind", [Sampler, Announcing])
def test_report_404_a_part_of_the_steps_is_counted_against_the_steps_that_are_run(name, kind):
    made, _ = sampler(name, kind)
    for strength, steps in ((0.5, 5), (0.2, 2), (1.0, 10)):
        seen = made(10, strength=strength)
        assert len(seen) >= steps
        assert places(seen) == whole(len(seen))


@pytest.mark.parametrize("name", ["DDIMScheduler", "EulerDiscreteScheduler"])
def test_report_404_denoising_end_is_counted_against_the_steps_that_are_run(name):
    made, _ = sampler(name, Announcing)
    assert places(made(10, end=7)) == whole(7)
    silent = Sampler(made.unet, made.scheduler)
    assert places(silent(10, end=7)) == whole(10)[:7]  # the scheduler alone knows no end
    silent._num_timesteps = 3  # left there by an earlier run of another method
    assert places(silent(6)) == whole(6)


def test_report_401_whoever_runs_the_model_tells_the_step():
    made, tracker = sampler("FlowMatchEulerDiscreteScheduler")
    made(3)
    copied = copy.copy(made)
    copied.scheduler = copy.deepcopy(made.scheduler)
    assert places(copied(4)) == whole(4)
    fresh = Sampler(made.unet, DDIMScheduler())
    assert places(fresh(5)) == whole(5)
    assert places(made(3, stop=2)) == whole(3)[:2]  # ends in the middle
    assert places(fresh(5)) == whole(5)
    assert places(copied(4)) == whole(4)
    later = Sampler(made.unet, made.scheduler)
    del made, copied
    assert places(later(6)) == whole(6)
    tracker.stop()
    assert type(fresh.scheduler) is DDIMScheduler
    assert type(later.scheduler) is FlowMatchEulerDiscreteScheduler


def test_report_401_a_copy_whose_scheduler_keeps_no_account_is_known_from_its_first_step():
    made, _ = sampler()
    for strength in (1.0, 0.5):
        copied = Announcing(made.unet, copy.deepcopy(made.scheduler))
        assert places(copied(4, strength=strength)) == whole(int(4 * strength))
    midway = Sampler(made.unet, DDIMScheduler())
    midway.scheduler.set_timesteps(4)
    assert places(midway.loop(midway.scheduler.timesteps[1:], None, True)) == (
        [Fallback.STEP_MET_MIDWAY] * 3
    )
    assert places(midway(4)) == whole(4)
    in_a_graph = Sampler(made.unet, DDIMScheduler())
    made.unet.eager = False
    assert places(in_a_graph(3)) == [Fallback.STEP_MET_MIDWAY] * 3
    assert places(in_a_graph(3)) == whole(3)


def test_report_402_two_threads_with_their_own_pipelines_have_their_own_steps():
    made, tracker = sampler("FlowMatchEulerDiscreteScheduler")
    others = [Sampler(made.unet, FlowMatchEulerDiscreteScheduler()) for _ in range(3)]
    barrier, seen = threading.Barrier(len(others)), {}

    def run(number):
        barrier.wait()
        seen[number] = [places(others[number](5 + number)) for _ in range(3)]

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(others))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {n: [whole(5 + n)] * 3 for n in range(len(others))}
    assert tracker.passed >= 5 + 6 + 7


def test_report_403_a_prior_has_the_steps_of_its_own_scheduler():
    prior, decoder = Denoiser(), Denoiser()
    inner = Sampler(prior, DDIMScheduler()), Sampler(decoder, DDIMScheduler())

    class Combined:
        def __init__(self):
            self.prior_prior, self.decoder = prior, decoder
            self.prior_scheduler, self.scheduler = inner[0].scheduler, inner[1].scheduler

        def __call__(self):
            return inner[0](3), inner[1](5)

        def by_itself(self):
            """Both run at once."""
            self.prior_scheduler.set_timesteps(3)
            self.scheduler.set_timesteps(6)
            self.scheduler.step(ZERO, self.scheduler.timesteps[0], ZERO)
            return prior(self.prior_scheduler.timesteps[0]), decoder(self.scheduler.timesteps[1])

    combined = Combined()
    prior.tracker = decoder.tracker = StepTracker(combined)
    assert [places(seen) for seen in combined()] == [whole(3), whole(5)]
    assert places(combined.by_itself()) == [(0, 3), (1, 6)]


def test_a_block_of_a_pipeline_gets_it_as_an_argument():
    """As the blocks of modular pipelines do."""

    class Block:
        def __call__(self, components, steps):
            return components.loop(components.timesteps(steps), None, True)

    class Bare:
        """Runs a model that belongs to its argument."""

        def __call__(self, components, timesteps):
            seen = []
            for t in timesteps:
                seen.append(components.unet(t))
                components.scheduler.step(ZERO, t, ZERO)
            return seen

    made, _ = sampler()
    assert places(Block()(made, 4)) == whole(4)
    other = Sampler(made.unet, FlowMatchEulerDiscreteScheduler())
    assert places(Bare()(other, other.timesteps(3))) == whole(3)


@pytest.mark.parametrize("wrapper", ["_orig_mod", "module"])
def test_a_wrapped_model_is_found_in_the_pipeline(wrapper):
    made, _ = sampler()
    around = nn.Module()
    around.add_module(wrapper, made.unet)
    around.forward = lambda time: made.unet(time)
    unet = made.unet
    other = Sampler(around, FlowMatchEulerDiscreteScheduler())
    assert places(other(3)) == whole(3)
    assert unet.tracker.passed == 3


def test_of_two_schedulers_the_one_that_began_last_counts():
    made, _ = sampler()
    made.inverse_scheduler = diffusers.DDIMInverseScheduler()
    assert places(made(4)) == whole(4)
    scheduler, made.scheduler = made.scheduler, made.inverse_scheduler
    made.forward_scheduler = scheduler
    assert places(made(5)) == whole(5)


@pytest.mark.parametrize("eager", [True, False])
def test_report_405_a_scheduler_that_does_not_step_tells_nothing(eager):
    made, _ = sampler(forwards=2)
    made.unet.eager = eager
    seen = made(20, advance=False)
    known = 2 if eager else MOST_CALLS_OF_A_STEP
    assert places(seen)[:known] == [(0, 20)] * known
    assert set(places(seen)[known:]) == {Fallback.STEP_STANDS_STILL}
    assert places(made(3)) == whole(3, 2)


def test_report_405_before_and_past_a_run_nothing_is_known():
    made, _ = sampler()

    class Reader(Sampler):
        def loop(self, timesteps, stop, advance):
            return [self.unet(timesteps[0])]

    reader = Reader(made.unet, made.scheduler)
    assert places(reader.loop(torch.tensor([900.0]), 1, True)) == [Fallback.STEP_OUTSIDE_RUN]
    made(3)
    assert places(reader.loop(torch.tensor([900.0]), 1, True)) == [Fallback.STEP_OUTSIDE_RUN]


def by_variables(unet, scheduler, scale):
    """A loop over parts; another model's timesteps come in between."""
    scheduler.set_timesteps(4)
    known, strange = [], []
    for t in scheduler.timesteps:
        known.append(unet(t / scale))
        strange.append(unet(torch.tensor(77.0)))
        scheduler.step(ZERO, t, ZERO)
    return known, strange


def by_pipeline(unet, scheduler, scale):
    """A loop over a pipeline that a variable has."""
    pipes = (Sampler(unet, scheduler),)

    def draw():
        (pipe,) = pipes
        pipe.scheduler.set_timesteps(4)
        known, strange = [], []
        for t in pipe.scheduler.timesteps:
            known.append(pipe.unet(t / scale))
            strange.append(pipe.unet(torch.tensor(77.0)))
            pipe.scheduler.step(ZERO, t, ZERO)
        return known, strange

    return draw()


def by_functions(unet, scheduler, scale):
    """A loop that knows neither by name."""
    parts = [unet, scheduler]

    def draw():
        parts[1].set_timesteps(4)
        known, strange = [], []
        for t in parts[1].timesteps:
            known.append(parts[0](t / scale))
            strange.append(parts[0](torch.tensor(77.0)))
            parts[1].step(ZERO, t, ZERO)
        return known, strange

    del unet, scheduler
    return draw()


@pytest.mark.parametrize("scale", [1, 1000])
@pytest.mark.parametrize("loop", [by_variables, by_pipeline, by_functions])
def test_report_405_a_loop_of_somebodys_own_is_of_the_run_by_thread_and_timestep(loop, scale):
    kept = [Sampler(Denoiser(), FlowMatchEulerDiscreteScheduler())]
    kept[0].unet.tracker = StepTracker(kept[0])
    known, strange = loop(kept[0].unet, kept[0].scheduler, scale)
    assert places(known) == whole(4)
    assert places(strange) == [Fallback.STEP_WITHOUT_SCHEDULER] * 4
    seen, timestep = [], kept[0].timesteps(4)[0]
    call = functools.partial(kept[0].unet, timestep)
    thread = threading.Thread(target=lambda: seen.append(call()))
    thread.start()
    thread.join()
    assert seen == [Fallback.STEP_WITHOUT_SCHEDULER]
    kept.clear()
    assert call() is Fallback.STEP_WITHOUT_SCHEDULER


def test_a_loop_of_somebodys_own_over_a_graph_keeps_nothing_alive():
    made, tracker = sampler()
    made.unet.eager = False

    def draw(unet, scheduler, steps):
        scheduler.set_timesteps(steps)
        seen = []
        for t in scheduler.timesteps:
            seen += [unet(t), unet(t)]
            scheduler.step(ZERO, t, ZERO)
        return [*seen, unet(t)]

    def stop(unet, scheduler):
        scheduler.set_timesteps(5)
        for t in scheduler.timesteps[:2]:
            unet(t)
            scheduler.step(ZERO, t, ZERO)

    other = FlowMatchEulerDiscreteScheduler()
    for steps in (4, 3):
        for scheduler in (made.scheduler, other):
            seen = draw(made.unet, scheduler, steps)
            assert places(seen) == [*whole(steps, 2), Fallback.STEP_OUTSIDE_RUN]
            stop(made.unet, scheduler)
    del scheduler
    unet, gone = made.unet, weakref.ref(made.scheduler)
    del made
    assert gone() is None
    assert tracker.now(unet) is Fallback.STEP_WITHOUT_SCHEDULER


def test_the_variables_of_callers_are_left_as_they_are():
    """Before Python 3.13 `locals()` is one dict of a function, which asking for them fills."""
    made, _ = sampler()

    def draw(prompt):
        options = locals()
        later = made(3)
        return options, later

    assert places(draw("a cat")[1]) == whole(3)
    assert draw("a cat")[0] == {"prompt": "a cat", "made": made}


def test_a_pipeline_in_a_variable_is_looked_for_there_first():
    made, _ = sampler("FlowMatchEulerDiscreteScheduler")

    def draw(pipes, number):
        first, pipe = pipes[number], pipes[1 - number]
        first.timesteps(9)
        pipe = first  # the variable that had it the last time, or another
        if number:
            del first
        pipe.scheduler.set_timesteps(3)
        seen = []
        for t in pipe.scheduler.timesteps:
            seen.append(pipe.unet(t))
            pipe.scheduler.step(ZERO, t, ZERO)
        return seen

    pipes = (made, Sampler(made.unet, FlowMatchEulerDiscreteScheduler()))
    for number in (0, 1, 0):
        assert places(draw(pipes, number)) == whole(3)
