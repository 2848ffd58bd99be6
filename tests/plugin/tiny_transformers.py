"""Tiny models of transformers with random weights, one for each way to call attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

TOKENS = 24
WORDS = 64


@dataclass(frozen=True)
class Family:
    """What one forward of a model of two layers does.

    Attributes:
        make: builds the model.
        inputs: its inputs.
        calls: attention calls of a forward.
        reason: why no kernel takes them, a word of it; empty where kernels take all.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    calls: int = 2
    reason: str = ""


@dataclass
class Tiny:
    """A model and its inputs."""

    module: nn.Module
    inputs: dict[str, torch.Tensor]

    def run(self, **changes: Any) -> torch.Tensor:
        """Logits, or the last hidden state."""
        with torch.no_grad():
            made = self.module(**{**self.inputs, **changes})
        logits = getattr(made, "logits", None)
        return made.last_hidden_state if logits is None else logits


def tiny(name: str) -> Tiny:
    """A fresh model of a family, the same each time."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    return Tiny(family.make().eval(), family.inputs())


def words(count: int = TOKENS, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, WORDS, (batch, count), generator=generator)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def _ids(count: int = TOKENS) -> dict[str, torch.Tensor]:
    return {"input_ids": words(count)}


def _padded() -> dict[str, torch.Tensor]:
    lengths = torch.tensor([[TOKENS], [15]])
    return {**_ids(), "attention_mask": (torch.arange(TOKENS)[None] < lengths).long()}


def _pair() -> dict[str, torch.Tensor]:
    return {**_ids(), "decoder_input_ids": words(12)}


def _picture() -> dict[str, torch.Tensor]:
    return {"pixel_values": numbers(2, 3, 16, 16)}


DECODER = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
ENCODER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
BOTH = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}  # fmt: skip
PICTURE = {**ENCODER, "image_size": 16, "patch_size": 4}


def _model(model: str, config: str, **fields: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**fields))
        return made

    return make


FAMILIES = {
    "llama": Family(_model("LlamaForCausalLM", "LlamaConfig", **DECODER), _ids),
    "mistral": Family(
        _model("MistralForCausalLM", "MistralConfig", **DECODER, sliding_window=8), _ids
    ),
    "gemma2": Family(  # a soft cap, and a window in every other layer
        _model(
            "Gemma2ForCausalLM", "Gemma2Config", **DECODER, head_dim=8, sliding_window=8,
            query_pre_attn_scalar=8, attn_logit_softcapping=0.001, initializer_range=0.5,
            attn_implementation="eager",
        ),
        _ids,
    ),
    "gpt-oss": Family(  # sinks
        _model(
            "GptOssForCausalLM", "GptOssConfig", **DECODER, head_dim=8, num_local_experts=2,
            num_experts_per_tok=1, sliding_window=8,
        ),
        _ids,
    ),
    "qwen3": Family(_model("Qwen3ForCausalLM", "Qwen3Config", **DECODER, head_dim=8), _ids),
    "phi3": Family(_model("Phi3ForCausalLM", "Phi3Config", **DECODER, pad_token_id=0), _ids),
    "deepseek-v3": Family(  # latent attention
        _model(
            "DeepseekV3ForCausalLM", "DeepseekV3Config",
            **(DECODER | {"num_key_value_heads": 4}), n_routed_experts=4, num_experts_per_tok=2,
            n_group=1, topk_group=1, moe_intermediate_size=16, q_lora_rank=8, kv_lora_rank=8,
            qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
        ),
        _ids,
        reason="V has 8 channels and Q 12",
    ),
    "gpt2": Family(
        _model("GPT2LMHeadModel", "GPT2Config", vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4),
        _ids,
    ),
    "opt": Family(
        _model(
            "OPTForCausalLM", "OPTConfig", vocab_size=WORDS, hidden_size=32, num_hidden_layers=2,
            ffn_dim=64, num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32,
        ),
        _ids,
    ),
    "bert": Family(_model("BertModel", "BertConfig", vocab_size=WORDS, **ENCODER), _padded),
    "modernbert": Family(
        _model(
            "ModernBertModel", "ModernBertConfig", vocab_size=WORDS, **ENCODER, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, local_attention=8,
        ),
        _padded,
    ),
    "clip text": Family(
        _model(
            "CLIPTextModel", "CLIPTextConfig", vocab_size=WORDS, **ENCODER, bos_token_id=1,
            eos_token_id=2,
        ),
        _ids,
    ),
    "t5": Family(
        _model(
            "T5ForConditionalGeneration", "T5Config", vocab_size=WORDS, d_model=32, d_kv=8,
            d_ff=64, num_layers=2, num_heads=4,
        ),
        _pair,
        calls=6,
        reason="position_bias",
    ),
    "bart": Family(
        _model("BartForConditionalGeneration", "BartConfig", **BOTH, max_position_embeddings=64),
        _pair,
        calls=6,
    ),
    "whisper": Family(
        _model(
            "WhisperForConditionalGeneration", "WhisperConfig", **BOTH, num_mel_bins=8,
            max_source_positions=20, max_target_positions=32, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=1,
        ),
        lambda: {"input_features": numbers(2, 8, 40), "decoder_input_ids": words(12)},
        calls=6,
    ),
    "vit": Family(_model("ViTModel", "ViTConfig", **PICTURE), _picture),
    "siglip": Family(_model("SiglipVisionModel", "SiglipVisionConfig", **PICTURE), _picture),
    "wav2vec2": Family(
        _model(
            "Wav2Vec2Model", "Wav2Vec2Config", **ENCODER, conv_dim=(16, 16), conv_stride=(5, 2),
            conv_kernel=(10, 3), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        ),
        lambda: {"input_values": numbers(2, 400)},
    ),
}  # fmt: skip
