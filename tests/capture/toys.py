"""Small models, hand-made attention calls and manifest lines for the capture tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from torch import nn

from sage_plugin.capture.record import AttentionCapture
from sage_plugin.kernels.contract import Decision
from sage_plugin.plugin.context import CallEvent
from sage_plugin.schema import ATTENTION, SCHEMA_VERSION, CallShape

LAYERS = 3
SCRIPT = """
import sys
import torch
from tests.capture.toys import denoise, video_model

model = video_model()
{patch}
denoise(model, steps=int(sys.argv[1]) if len(sys.argv) > 1 else 4)
{end}
"""
"""A user's script: `SCRIPT.format(patch="", end="")`."""


def video_model() -> nn.Module:
    """A CogVideoX transformer: text tokens first, RoPE written in place after the projections."""
    torch.manual_seed(0)
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
        num_layers=LAYERS, time_embed_dim=2, text_embed_dim=8, sample_width=8, sample_height=8,
        sample_frames=8, patch_size=2, temporal_compression_ratio=4, max_text_seq_length=8,
        use_rotary_positional_embeddings=True,
    ).eval()  # fmt: skip


def denoise(model: Any, steps: int = 4, start: int = 900) -> None:
    """Forwards with falling timesteps, called with keywords as a pipeline does."""
    generator = torch.Generator().manual_seed(1)
    rotary = get_3d_rotary_pos_embed(16, ((0, 0), (4, 4)), (4, 4), 2)
    for step in range(steps):
        with torch.no_grad():
            model(
                hidden_states=torch.randn(2, 2, 4, 8, 8, generator=generator),
                encoder_hidden_states=torch.randn(2, 8, 8, generator=generator),
                timestep=torch.tensor([start - step] * 2),
                image_rotary_emb=rotary,
                return_dict=False,
            )


def autoencoder() -> nn.Module:
    """What no recording touches; it has attention too."""
    return diffusers.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=4, sample_size=8
    ).eval()


def processors(model: nn.Module) -> dict[str, type]:
    """The attention processors of a model, by class."""
    return {n: type(m.processor) for n, m in model.named_modules() if hasattr(m, "processor")}


class Pipeline:
    """What `patch` and `record` see of a pipeline."""

    def __init__(self, **components: Any) -> None:
        self.components = components
        self.__dict__.update(components)


def event(
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    mask: torch.Tensor | None = None,
    layout: str = "bhsd",
    layer: str = "transformer.blocks.0.attn1",
    call_index: int = 0,
    **changes: Any,
) -> CallEvent:
    """An attention call as a listener gets it."""
    made = CallEvent(
        component="transformer",
        layer=layer,
        call_index=call_index,
        q=q,
        k=q if k is None else k,
        v=q if v is None else v,
        attn_mask=mask,
        is_causal=False,
        scale=None,
        layout=layout,
        decision=Decision("sdpa", "host"),
    )
    return dataclasses.replace(made, **changes)


def shape(**changes: Any) -> CallShape:
    base = CallShape(
        batch=1, heads_q=2, heads_k=2, seq_q=4, seq_k=4, head_dim=8, dv=8, dtype="float32",
        causal=False, mask_kind="none", layout="bhsd", scale=0.5,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def line(**changes: Any) -> AttentionCapture:
    """A manifest line that fits `tensors()`."""
    base = AttentionCapture(
        schema_version=SCHEMA_VERSION, family=ATTENTION, file="",
        layer="transformer.blocks.0.attn1", step=0, timestep=1.0, call_index=0, shape=shape(),
        batch_indices=(0,), head_indices=(0, 1),
        strides_q=(64, 32, 8, 1), strides_k=(64, 32, 8, 1), strides_v=(64, 32, 8, 1),
        text_length=None, model_class="Toy", config_hash="", versions={"torch": "0"}, sha256="",
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(1, 2, 4, 8, generator=generator) for name in "qkv"}
