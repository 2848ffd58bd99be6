"""What the tiny families share: how one is described, and the inputs that they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sage_plugin.kernels.fallback import FallbackReason
from tests.plugin.tiny import random

ATTENTION = {"num_attention_heads": 2, "attention_head_dim": 16}
FOUR = {"in_channels": 4, "out_channels": 4}
BLOCKS = {"num_layers": 1, "num_single_layers": 1}
ROPE = (4, 4, 8)
WORDS = 12
"""Tokens of a text; images and videos have 16 tokens or more."""


@dataclass(frozen=True)
class Family:
    """What one forward of a family's model does.

    Attributes:
        build: makes a model and its inputs.
        calls: attention calls that a patch catches.
        fallbacks: how many of them no kernel takes, by reason.
        flex: how many of them go to FlexAttention instead of SDPA.
        skipped: processors without an attention call, which are left as they are.
    """

    build: Callable[[], tuple[nn.Module, dict[str, Any]]]
    calls: int
    fallbacks: dict[FallbackReason, int] = field(default_factory=dict)
    flex: int = 0
    skipped: int = 0


def text(width: int = 16, tokens: int = WORDS) -> torch.Tensor:
    return random(1, tokens, width)


def ones(tokens: int = WORDS) -> torch.Tensor:
    return torch.ones(1, tokens, dtype=torch.bool)


def padded(tokens: int = WORDS) -> torch.Tensor:
    """A mask of a text whose last two thirds are padding."""
    return (torch.arange(tokens) < tokens // 3)[None]


def step() -> torch.Tensor:
    return torch.tensor([1.0])


def image(channels: int = 4, side: int = 8) -> torch.Tensor:
    return random(1, channels, side, side)


def video(channels: int = 4, frames: int = 2, side: int = 8) -> torch.Tensor:
    return random(1, channels, frames, side, side)


def rotary(tokens: int, width: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of angles."""
    angles = random(tokens, width // 2).repeat_interleave(2, 1)
    return angles.cos(), angles.sin()


def latents(hidden_states: torch.Tensor) -> dict[str, Any]:
    """An image or a video, its text and its time, by the names that most models give them."""
    return {
        "hidden_states": hidden_states, "encoder_hidden_states": text(), "timestep": step()
    }  # fmt: skip


def masked(hidden_states: torch.Tensor) -> dict[str, Any]:
    """The same with a text that is padded."""
    return {**latents(hidden_states), "encoder_attention_mask": padded()}


def with_ids(axes: int = 3) -> dict[str, Any]:
    """What the relatives of Flux take: tokens with their positions."""
    return {
        **latents(random(1, 16, 4)),
        "img_ids": torch.arange(16.0)[:, None].repeat(1, axes),
        "txt_ids": torch.zeros(WORDS, axes),
    }


def sizes() -> dict[str, torch.Tensor]:
    return {
        "target_size": torch.tensor([[64.0, 64.0]]),
        "crop_coords": torch.tensor([[0.0, 0.0]]),
    }
