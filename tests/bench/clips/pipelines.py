"""A toy pipeline: one attention layer that denoises fixed latents, and a scheduler that counts."""

from __future__ import annotations

import numpy as np
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.models.attention_processor import Attention
from torch import nn

TOKENS, DIM, STEPS = 64, 16, 4


class ToyTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attn = Attention(query_dim=DIM, heads=2, dim_head=32)

    def forward(self, x):
        return self.attn(x)


class ToyPipeline(DiffusionPipeline):
    def __init__(self, transformer, scheduler):
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)

    @torch.no_grad()
    def __call__(self, steps, on_step):
        x = torch.randn(1, TOKENS, DIM, generator=torch.Generator().manual_seed(0))
        self.scheduler.set_timesteps(steps)
        for timestep in self.scheduler.timesteps:
            out = self.transformer(x)
            x = self.scheduler.step(out, timestep, x, return_dict=False)[0]
            on_step(x)
        return (x / 8 + 0.5).clamp(0, 1).reshape(2, 8, 8, 8)


def toy():
    return ToyPipeline(ToyTransformer(), FlowMatchEulerDiscreteScheduler())


def drawing(pipe, steps=STEPS):
    """A draw callable of the toy: (F, H, W, C) = (2, 8, 8, 8)."""
    return lambda on_step: np.asarray(pipe(steps, on_step), dtype=np.float32)
