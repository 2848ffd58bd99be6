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

    def forward(self, x, timestep):
        return self.attn(x)


class ToyPipeline(DiffusionPipeline):
    def __init__(self, transformer, scheduler):
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)


def toy():
    return ToyPipeline(ToyTransformer(), FlowMatchEulerDiscreteScheduler())


def drawing(pipe, steps=STEPS):
    """A draw callable of the toy: (F, H, W, C) = (2, 8, 8, 8)."""

    @torch.no_grad()
    def draw(on_step):
        x = torch.randn(1, TOKENS, DIM, generator=torch.Generator().manual_seed(0))
        pipe.scheduler.set_timesteps(steps)
        for timestep in pipe.scheduler.timesteps:
            out = pipe.transformer(x, timestep)
            x = pipe.scheduler.step(out, timestep, x, return_dict=False)[0]
            on_step(x)
        clip = (x / 8 + 0.5).clamp(0, 1).reshape(2, 8, 8, 8)
        return np.asarray(clip, dtype=np.float32)

    return draw
