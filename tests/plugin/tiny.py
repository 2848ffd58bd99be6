"""Tiny randomly initialised diffusers models with inputs, one for each way to reach attention."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from torch import nn

CALLS = {"cogx": 2, "wan": 4, "flux": 2, "sd3": 3, "unet": 8}
"""Attention calls of one forward; CogVideoX, SD3 and the UNet call SDPA, Wan and Flux dispatch."""


@dataclass
class Tiny:
    module: nn.Module
    inputs: dict[str, Any]

    def run(self, module: nn.Module | None = None, **changes: Any) -> torch.Tensor:
        with torch.no_grad():
            return (self.module if module is None else module)(**{**self.inputs, **changes})[0]


def tiny(name: str) -> Tiny:
    """A fresh copy of a model."""
    return copy.deepcopy(_built(name))


@functools.cache
def _built(name: str) -> Tiny:
    torch.manual_seed(0)
    module, inputs = globals()[f"_{name}"]()
    return Tiny(module.eval(), {**inputs, "return_dict": False})


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _cogx():
    module = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2,
        time_embed_dim=2, text_embed_dim=8, sample_width=8, sample_height=8, sample_frames=8,
        patch_size=2, temporal_compression_ratio=4, max_text_seq_length=8,
        use_rotary_positional_embeddings=True,
    )  # fmt: skip
    return module, {
        "hidden_states": random(2, 2, 4, 8, 8),
        "encoder_hidden_states": random(2, 8, 8),
        "timestep": torch.tensor([1, 1]),
        "image_rotary_emb": get_3d_rotary_pos_embed(16, ((0, 0), (4, 4)), (4, 4), 2),
    }


def _wan(num_layers: int = 2):
    module = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=num_layers,
        cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    return module, {
        "hidden_states": random(2, 4, 3, 8, 8),
        "encoder_hidden_states": random(2, 12, 16),
        "timestep": torch.tensor([1, 1]),
    }


def _wan12():
    return _wan(num_layers=12)


def _flux():
    module = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return module, {
        "hidden_states": random(1, 16, 4),
        "encoder_hidden_states": random(1, 8, 32),
        "pooled_projections": random(1, 32),
        "timestep": torch.tensor([1.0]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }


def _sd3():
    module = diffusers.SD3Transformer2DModel(
        sample_size=32, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32,
        pooled_projection_dim=64, out_channels=4, pos_embed_max_size=96,
        dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    return module, {
        "hidden_states": random(1, 4, 8, 8),
        "encoder_hidden_states": random(1, 8, 32),
        "pooled_projections": random(1, 64),
        "timestep": torch.tensor([1.0]),
    }


def _unet():
    module = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, in_channels=4,
        out_channels=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=16,
        attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    return module, {
        "sample": random(1, 4, 8, 8),
        "timestep": torch.tensor([1.0]),
        "encoder_hidden_states": random(1, 8, 16),
    }


def vae() -> nn.Module:
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=4, sample_size=8
    ).eval()


class Pipeline:
    """What `patch` sees of a pipeline: its components."""

    def __init__(self, **components: Any) -> None:
        self.components = components
        self.__dict__.update(components)
