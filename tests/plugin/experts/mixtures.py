"""Tiny mixtures of transformers with random weights."""

from __future__ import annotations

import torch
from torch import nn

CONFIG = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
NAMES = ("mixtral", "qwen3_moe", "gpt_oss")
WORDS = torch.arange(1, 25).view(2, 12)


def mixture(name: str) -> nn.Module:
    """A fresh mixture, the same each time."""
    import transformers

    torch.manual_seed(0)
    if name == "mixtral":
        config = transformers.MixtralConfig(intermediate_size=48, num_local_experts=4, **CONFIG)
        return transformers.MixtralForCausalLM(config).eval()
    if name == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            intermediate_size=48, moe_intermediate_size=48, num_experts=6, num_experts_per_tok=3,
            head_dim=16, **CONFIG,
        )  # fmt: skip
        return transformers.Qwen3MoeForCausalLM(config).eval()
    # interleaved gates with a clamp of their own, biases, weights the other way round
    config = transformers.GptOssConfig(
        intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, head_dim=16, **CONFIG
    )
    return transformers.GptOssForCausalLM(config).eval()


def logits(model: nn.Module) -> torch.Tensor:
    """What a model says of some words."""
    with torch.no_grad():
        return model(WORDS).logits


def experts_of(model: nn.Module) -> nn.Module:
    """The experts of the first layer."""
    return model.model.layers[0].mlp.experts
