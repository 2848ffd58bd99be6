"""CogVideoX with its sequence over several GPUs, which diffusers has no plan for; no program.

A processor as diffusers writes them today, which tells `dispatch_attention_fn` how the sequence is
spread, and the plan: text and video are split in front of the blocks and gathered behind them.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ContextParallelConfig
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from torch import nn

TOKENS = ContextParallelInput(split_dim=1, expected_dims=3)
ANGLES = ContextParallelInput(split_dim=0, expected_dims=2)
PLAN: dict[str, Any] = {
    "transformer_blocks.0": {"hidden_states": TOKENS, "encoder_hidden_states": TOKENS},
    "transformer_blocks.*": {"image_rotary_emb": [ANGLES, ANGLES]},
    "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
}


class SpreadProcessor:
    """CogVideoX's attention over text and video together, through diffusers' dispatcher."""

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self,
        attn: Any,  # noqa: ANN401
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend; `(video, text)` of this process."""
        text = encoder_hidden_states.size(1)
        x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        q, k, v = (
            project(x).unflatten(2, (attn.heads, -1))
            for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        if attn.norm_q is not None:
            q, k = attn.norm_q(q), attn.norm_k(k)
        if image_rotary_emb is not None:
            q, k = (
                torch.cat([part[:, :text], _rotated(part[:, text:], image_rotary_emb)], dim=1)
                for part in (q, k)
            )
        out = dispatch_attention_fn(
            q, k, v, attn_mask=attention_mask, backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )  # fmt: skip
        out = attn.to_out[1](attn.to_out[0](out.flatten(2, 3)))
        return out[:, text:], out[:, :text]


def _rotated(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return apply_rotary_emb(x.transpose(1, 2), angles).transpose(1, 2)


def spread(model: nn.Module, way: str, degree: int) -> None:
    """Spread a model's sequence over all processes.

    Args:
        model: a denoiser; a CogVideoX with `SpreadProcessor`s.
        way: `ulysses` or `ring`.
        degree: number of processes.
    """
    config = ContextParallelConfig(**{f"{way}_degree": degree})
    plan = PLAN if type(model).__name__.startswith("CogVideoX") else None
    model.enable_parallelism(config=config, cp_plan=plan)
