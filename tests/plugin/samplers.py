"""Loops of denoising steps that ask a tracker where they stand."""

from __future__ import annotations

import diffusers
import torch
from torch import nn

from sage_plugin.plugin.steps.forward import ForwardCounter
from sage_plugin.plugin.steps.tracker import Step, StepTracker

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
