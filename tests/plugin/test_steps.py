"""The denoising step of a model: which scheduler counts, for whom, and when it cannot be known."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import threading
import weakref

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from torch import nn

from sage_plugin.kernels.fallback import Fallback
from sage_plugin.plugin.steps.caller import schedulers_of
from sage_plugin.plugin.steps.forward import ForwardCounter
from sage_plugin.plugin.steps.scheduler import counts_steps
from sage_plugin.plugin.steps.tracker import MOST_CALLS_OF_A_STEP, Step, StepTracker

SCHEDULERS = (
    "DDIMScheduler", "CogVideoXDDIMScheduler", "EulerDiscreteScheduler",
    "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler", "DPMSolverMultistepScheduler",
    "LCMScheduler", "PNDMScheduler", "HeunDiscreteScheduler", "KDPM2DiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler", "DDPMScheduler",
)  # fmt: skip
ZERO = torch.zeros(1, 4, 2, 2)


class Denoiser(nn.Module):
    """Asks a tracker for the step, as patched layers do."""

    tracker: StepTracker
    eager = True

    def __init__(self):
        super().__init__()
        self.counter = ForwardCounter(self)

    def forward(self, timestep):
        if not self.eager:
            return self.tracker.now(self, self)
        self.tracker.enter(self.counter.begin(self, (), {"timestep": timestep}))
        try:
            return self.tracker.now(self)
        finally:
            self.tracker.leave()


class Sampler:
    """A loop of denoising steps: where each forward stands.

    Args:
        forwards: how many a step has.
    """

    def __init__(self, unet, scheduler, forwards=1):
        self.unet, self.scheduler, self.forwards = unet, scheduler, forwards

    def __call__(self, steps, *, stop=None, advance=True, **part):
        return self.loop(self.timesteps(steps, **part), stop, advance)

    def timesteps(self, steps, strength=1.0, end=None):
        """Those of a run of a part of the steps: from `strength` on, up to `end`."""
        self.scheduler.set_timesteps(steps)
        begin = (steps - int(steps * strength)) * self.scheduler.order
        if begin and hasattr(self.scheduler, "set_begin_index"):
            self.scheduler.set_begin_index(begin)
        return self.scheduler.timesteps[begin:end]

    def loop(self, timesteps, stop, advance):
        latents, seen = ZERO, []
        scale = getattr(self.scheduler, "scale_model_input", lambda x, _: x)
        for t in timesteps[:stop]:
            time = t.expand(2)
            scaled = scale(latents, t)
            seen += [self.unet(time) for _ in range(self.forwards)]
            if advance:
                noise = torch.zeros_like(scaled)
                latents = self.scheduler.step(noise, t, latents, return_dict=False)[0]
        return seen


class Announcing(Sampler):
    """Says how many steps its loop has, as newer pipelines do."""

    def __call__(self, steps, *, stop=None, advance=True, **part):
        timesteps = self.timesteps(steps, **part)
        self._num_timesteps = len(timesteps)
        return self.loop(timesteps, stop, advance)


def sampler(name="DDIMScheduler", kind=Sampler, **options):
    """A sampler whose steps are tracked, and its tracker."""
    made = kind(Denoiser(), getattr(diffusers, name)(), **options)
    made.unet.tracker = StepTracker(made)
    return made, made.unet.tracker


def places(seen):
    """Step and total of each forward, or why they are not known."""
    return [(x.index, x.total) if isinstance(x, Step) else x for x in seen]


def whole(total, forwards=1):
    return [(step, total) for step in range(total) for _ in range(forwards)]


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
