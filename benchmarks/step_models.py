"""Full-size transformers with random weights and the inputs of one step; no program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import random_weights
import torch
from diffusers import (
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    WanTransformer3DModel,
)
from random_weights import RandomStep

DTYPE = torch.bfloat16
SEED = 0

WAN_1_3B: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 8960,
    "num_layers": 30,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
}
WAN_TINY = {"num_attention_heads": 2, "attention_head_dim": 32, "text_dim": 16, "ffn_dim": 32,
            "num_layers": 2, "freq_dim": 32}  # fmt: skip
WAN_14B = WAN_1_3B | {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}
FLUX_DEV: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}
FLUX_TINY = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 32,
             "num_attention_heads": 2, "joint_attention_dim": 16, "pooled_projection_dim": 16,
             "axes_dims_rope": (8, 8, 16)}  # fmt: skip
QWEN_IMAGE: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "axes_dims_rope": (16, 56, 56),
}
QWEN_TINY = {"num_layers": 2, "attention_head_dim": 32, "num_attention_heads": 2,
             "joint_attention_dim": 16, "axes_dims_rope": (8, 8, 16)}  # fmt: skip
TEXT_TOKENS = 512


def build(
    name: str, device: torch.device, *, tiny: bool = False, layers: int | None = None
) -> RandomStep:
    """A model of `MODELS` and the arguments of one forward, in bf16.

    Args:
        name: which.
        device: where.
        tiny: small numbers, for a CPU.
        layers: at most so many blocks of each kind, `None` for all.
    """
    return MODELS[name](device, tiny, layers)


Build = Callable[[torch.device, bool, "int | None"], RandomStep]


def _cogvideox(variant: str) -> Build:
    def build(device: torch.device, tiny: bool, layers: int | None) -> RandomStep:
        return random_weights.build(variant, device, DTYPE, tiny=tiny, seed=SEED, layers=layers)

    return build


def _wan(full: dict[str, Any]) -> Build:
    """81 frames of 480x832: latents of 21 x 60 x 104."""

    def build(device: torch.device, tiny: bool, layers: int | None) -> RandomStep:
        config = random_weights.fewer(full | (WAN_TINY if tiny else {}), layers)
        frames, height, width = (3, 8, 8) if tiny else (21, 60, 104)
        draw, generator = _drawing(device)
        model = random_weights.with_random_weights(
            WanTransformer3DModel, config, device, DTYPE, generator
        )
        _remake_rope(model, config, device)
        arguments = {
            "hidden_states": draw(1, config["in_channels"], frames, height, width),
            "timestep": torch.full((1,), 500, device=device),
            "encoder_hidden_states": draw(1, 12 if tiny else TEXT_TOKENS, config["text_dim"]),
            "return_dict": False,
        }
        return RandomStep(model, arguments, config, frames * height * width // 4)

    return build


def _qwen_image(device: torch.device, tiny: bool, layers: int | None) -> RandomStep:
    """A picture of 1328x1328: 83 x 83 patches; no mask, which pipelines drop if all true."""
    config = random_weights.fewer(QWEN_IMAGE | (QWEN_TINY if tiny else {}), layers)
    across, text = (8, 12) if tiny else (83, TEXT_TOKENS)
    draw, generator = _drawing(device)
    model = random_weights.with_random_weights(
        QwenImageTransformer2DModel, config, device, DTYPE, generator
    )
    model.pos_embed = type(model.pos_embed)(
        theta=10000, axes_dim=list(config["axes_dims_rope"]), scale_rope=True
    )
    arguments = {
        "hidden_states": draw(1, across * across, config["in_channels"]),
        "encoder_hidden_states": draw(1, text, config["joint_attention_dim"]),
        "timestep": torch.full((1,), 0.5, device=device, dtype=DTYPE),
        "img_shapes": [[(1, across, across)]],
        "return_dict": False,
    }
    return RandomStep(model, arguments, config, across * across + text)


def _flux(side: int) -> Build:
    """Pictures of 16 times as many pixels a side."""

    def build(device: torch.device, tiny: bool, layers: int | None) -> RandomStep:
        config = random_weights.fewer(FLUX_DEV | (FLUX_TINY if tiny else {}), layers)
        across, text = (8, 12) if tiny else (side, TEXT_TOKENS)
        draw, generator = _drawing(device)
        model = random_weights.with_random_weights(
            FluxTransformer2DModel, config, device, DTYPE, generator
        )
        steps = torch.arange(across, dtype=torch.float32, device=device)
        arguments = {
            "hidden_states": draw(1, across * across, config["in_channels"]),
            "encoder_hidden_states": draw(1, text, config["joint_attention_dim"]),
            "pooled_projections": draw(1, config["pooled_projection_dim"]),
            "timestep": torch.full((1,), 0.5, device=device, dtype=DTYPE),
            "guidance": torch.full((1,), 3.5, device=device),
            "img_ids": torch.cartesian_prod(torch.zeros(1, device=device), steps, steps),
            "txt_ids": torch.zeros(text, 3, device=device),
            "return_dict": False,
        }
        return RandomStep(model, arguments, config, across * across + text)

    return build


def _drawing(
    device: torch.device,
) -> tuple[Callable[..., torch.Tensor], torch.Generator]:
    generator = torch.Generator(device).manual_seed(SEED)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=DTYPE)

    return draw, generator


def _remake_rope(
    model: WanTransformer3DModel, config: dict[str, Any], device: torch.device
) -> None:
    """Its table of angles is a buffer, which random numbers would replace."""
    rope = type(model.rope)(config["attention_head_dim"], config["patch_size"], 1024)
    model.rope = rope.to(device)


MODELS: dict[str, Build] = {
    "cogvideox-2b": _cogvideox("2b"),
    "cogvideox-5b": _cogvideox("5b"),
    "wan-1.3b": _wan(WAN_1_3B),
    "wan-14b": _wan(WAN_14B),
    "qwen-image": _qwen_image,
    "flux-dev-1024": _flux(64),
    "flux-dev-2048": _flux(128),
}
