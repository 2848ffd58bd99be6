"""A CogVideoX transformer of full size with random weights: right for speed, not for pictures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from diffusers import CogVideoXTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from torch import nn

from sage_plugin.errors import DeviceError, UsageError

FULL: dict[str, Any] = {
    "attention_head_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "time_embed_dim": 512,
    "text_embed_dim": 4096,
    "max_text_seq_length": 226,
    "patch_size": 2,
    "temporal_compression_ratio": 4,
    # Latents of a clip of 49 frames of 480x720: 13 x 60 x 90, hence 13 x 30 x 45 + 226 tokens.
    "sample_frames": 49,
    "sample_height": 60,
    "sample_width": 90,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "2b": {
        **FULL,
        "num_layers": 30,
        "num_attention_heads": 30,
        "use_rotary_positional_embeddings": False,
    },
    "5b": {
        **FULL,
        "num_layers": 42,
        "num_attention_heads": 48,
        "use_rotary_positional_embeddings": True,
    },
}
TINY: dict[str, Any] = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "time_embed_dim": 16,
    "text_embed_dim": 32,
    "max_text_seq_length": 6,
    "sample_frames": 9,
    "sample_height": 12,
    "sample_width": 16,
}
"""In place of the full numbers, for trying the script on a CPU."""
Model = TypeVar("Model", bound=nn.Module)
BATCH = 2
"""Both halves of classifier-free guidance."""
WEIGHT_STD = 0.02


@dataclass(frozen=True, slots=True)
class RandomStep:
    """A transformer with the inputs of one denoising step.

    Attributes:
        model: in evaluation mode.
        arguments: keyword arguments of its forward.
        config: what the model was built from.
        tokens: length of the sequence that attention sees, text first.
    """

    model: CogVideoXTransformer3DModel
    arguments: dict[str, Any]
    config: dict[str, Any]
    tokens: int


def fewer(config: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """Return a configuration with at most so many blocks of each kind."""
    counts = {name: n for name, n in config.items() if name in ("num_layers", "num_single_layers")}
    return config | {name: n if layers is None else min(n, layers) for name, n in counts.items()}


def build(
    variant: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tiny: bool,
    seed: int,
    layers: int | None = None,
) -> RandomStep:
    """Draw weights and inputs on the device.

    Args:
        variant: a key of `VARIANTS`.
        device: where the model is built; a full one needs a GPU.
        dtype: of weights and inputs.
        tiny: the small numbers of `TINY`.
        seed: of weights and inputs.
        layers: at most so many blocks, `None` for all.

    Raises:
        UsageError: a full-size model on a CPU.
        DeviceError: it does not fit into the GPU's memory.
    """
    if device.type == "cpu" and not tiny:
        raise UsageError(
            "a full-size step needs a GPU: on a CPU it takes minutes and kernels are emulated; "
            "add --tiny to try the script here"
        )
    config = fewer(VARIANTS[variant] | (TINY if tiny else {}), layers)
    try:
        return _built(config, device, dtype, torch.Generator(device).manual_seed(seed))
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"CogVideoX {variant} does not fit into the memory of {device}"
        ) from error


def with_random_weights(
    kind: type[Model],
    config: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Model:
    """A model of diffusers in evaluation mode, its weights drawn where it lies.

    Args:
        kind: class of the model.
        config: what it is built from.
        device: where.
        dtype: of weights.
        generator: of that device.
    """
    with torch.device("meta"):
        model = kind(**config)
    nn.Module.to(model, dtype)  # diffusers' own `to` warns, of weights that are not there yet
    model.to_empty(device=device).eval().requires_grad_(False)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.dim() > 1:
            tensor.normal_(std=WEIGHT_STD, generator=generator)
        else:  # norms and biases as they are before training
            tensor.fill_(1.0 if name.endswith("weight") else 0.0)
    return model


def _built(
    config: dict[str, Any], device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> RandomStep:
    model = with_random_weights(CogVideoXTransformer3DModel, config, device, dtype, generator)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    frames = (config["sample_frames"] - 1) // config["temporal_compression_ratio"] + 1
    height, width = config["sample_height"], config["sample_width"]
    grid = (height // config["patch_size"], width // config["patch_size"])
    arguments: dict[str, Any] = {
        "hidden_states": draw(BATCH, frames, config["in_channels"], height, width),
        "encoder_hidden_states": draw(
            BATCH, config["max_text_seq_length"], config["text_embed_dim"]
        ),
        "timestep": torch.full((BATCH,), 500, device=device),
        "return_dict": False,
    }
    if config["use_rotary_positional_embeddings"]:
        arguments["image_rotary_emb"] = get_3d_rotary_pos_embed(
            config["attention_head_dim"], ((0, 0), grid), grid, frames, device=device
        )
    tokens = config["max_text_seq_length"] + frames * math.prod(grid)
    return RandomStep(model, arguments, config, tokens)
