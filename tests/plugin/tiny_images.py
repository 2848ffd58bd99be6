"""Tiny models of families that make images."""

from __future__ import annotations

import diffusers
import torch
from diffusers.models.transformers import transformer_flux2
from diffusers.models.unets import StableCascadeUNet

from tests.plugin.tiny import random
from tests.plugin.tiny_inputs import (
    ATTENTION,
    BLOCKS,
    FOUR,
    ROPE,
    WORDS,
    Family,
    image,
    latents,
    masked,
    ones,
    padded,
    rotary,
    sizes,
    step,
    text,
    with_ids,
)  # fmt: skip


def _auraflow():
    module = diffusers.AuraFlowTransformer2DModel(
        **ATTENTION, **FOUR, sample_size=8, num_mmdit_layers=1, num_single_dit_layers=1,
        joint_attention_dim=16, caption_projection_dim=32, pos_embed_max_size=16,
    )  # fmt: skip
    for parameter in module.parameters():
        parameter.data.mul_(3)  # no gate has a bias that would open it
    return module, latents(image())


def _bria():
    return diffusers.BriaTransformer2DModel(
        **ATTENTION, **BLOCKS, in_channels=4, joint_attention_dim=16, axes_dims_rope=list(ROPE)
    ), with_ids()  # fmt: skip


def _bria_fibo():
    return diffusers.BriaFiboTransformer2DModel(
        **ATTENTION, **BLOCKS, in_channels=4, joint_attention_dim=16, axes_dims_rope=list(ROPE),
        text_encoder_dim=16,
    ), {**with_ids(), "text_encoder_layers": [text(), text()]}  # fmt: skip


def _cascade():
    return StableCascadeUNet(
        in_channels=4, out_channels=4, timestep_ratio_embedding_dim=8, conditioning_dim=32,
        block_out_channels=(32, 32), num_attention_heads=(2, 2), down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1), down_blocks_repeat_mappers=(1, 1),
        up_blocks_repeat_mappers=(1, 1), clip_text_in_channels=16, clip_text_pooled_in_channels=16,
        clip_image_in_channels=16, clip_seq=2, block_types_per_layer=(
            ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
        ) * 2,
    ), {
        "sample": image(), "timestep_ratio": step(), "clip_text_pooled": text(16, 1),
        "clip_text": text(), "clip_img": text(16, 1),
    }  # fmt: skip


def _chroma():
    return diffusers.ChromaTransformer2DModel(
        **ATTENTION, **BLOCKS, in_channels=4, joint_attention_dim=16, axes_dims_rope=ROPE,
        approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1,
    ), {**with_ids(), "attention_mask": torch.cat([padded(), ones(16)], 1)}  # fmt: skip


def _cogview3():
    return diffusers.CogView3PlusTransformer2DModel(
        **ATTENTION, **FOUR, num_layers=2, text_embed_dim=16, time_embed_dim=8, condition_dim=2,
        pos_embed_max_size=8, sample_size=8,
    ), {**latents(image()), **sizes(), "original_size": torch.ones(1, 2)}  # fmt: skip


def _cogview4():
    return diffusers.CogView4Transformer2DModel(
        **ATTENTION, **FOUR, num_layers=2, text_embed_dim=16, time_embed_dim=8, condition_dim=4,
        pos_embed_max_size=8, sample_size=8, rope_axes_dim=(8, 8),
    ), {**latents(image()), **sizes(), "original_size": torch.ones(1, 2)}  # fmt: skip


def _dit():
    return diffusers.DiTTransformer2DModel(
        **ATTENTION, in_channels=4, num_layers=2, sample_size=8
    ), {
        "hidden_states": image(), "timestep": torch.tensor([1]), "class_labels": torch.tensor([1])
    }  # fmt: skip


def _ernie():
    return diffusers.ErnieImageTransformer2DModel(
        **FOUR, hidden_size=32, num_attention_heads=2, num_layers=2, ffn_hidden_size=32,
        text_in_dim=16, rope_axes_dim=ROPE,
    ), {
        "hidden_states": image(side=4), "timestep": step(), "text_bth": text(),
        "text_lens": torch.tensor([4]),
    }  # fmt: skip


def _flux2():
    return diffusers.Flux2Transformer2DModel(
        **ATTENTION, **BLOCKS, in_channels=4, joint_attention_dim=16, timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    ), {**with_ids(4), "guidance": step()}  # fmt: skip


def _flux2_kv():
    """Keys of reference images are kept; the call lies in a function of the module."""
    module, inputs = _flux2()
    for block in module.transformer_blocks:
        block.attn.set_processor(transformer_flux2.Flux2KVAttnProcessor())
    for block in module.single_transformer_blocks:
        block.attn.set_processor(transformer_flux2.Flux2KVParallelSelfAttnProcessor())
    return module, {**inputs, "kv_cache_mode": "extract", "num_ref_tokens": 6}


def _flux3():
    return diffusers.Flux3Transformer2DModel(
        **ATTENTION, **BLOCKS, in_channels=4, cond_in_channels=4, joint_attention_dim=16,
        timestep_channels=16, axes_dims_rope=(4, 4, 4, 4),
    ), {
        **with_ids(4), "image_cond_hidden_states": random(1, 4, 4),
        "image_cond_ids": torch.arange(4.0)[:, None].repeat(1, 4),
    }  # fmt: skip


def _glm_image():
    return diffusers.GlmImageTransformer2DModel(
        **ATTENTION, **FOUR, num_layers=2, text_embed_dim=16, time_embed_dim=8, condition_dim=4,
        prior_vq_quantizer_codebook_size=16,
    ), {
        **latents(image()), **sizes(), "prior_token_id": torch.arange(16)[None],
        "prior_token_drop": torch.zeros(1, 16, dtype=torch.bool),
    }  # fmt: skip


def _hidream():
    return diffusers.HiDreamImageTransformer2DModel(
        **ATTENTION, **FOUR, **BLOCKS, patch_size=2, caption_channels=[16, 16], text_emb_dim=8,
        axes_dims_rope=(8, 4, 4), max_resolution=(4, 4), llama_layers=[0, 1],
        force_inference_output=True,
    ), {
        "hidden_states": image(), "timesteps": step(), "encoder_hidden_states_t5": text(),
        "encoder_hidden_states_llama3": random(2, 1, WORDS, 16), "pooled_embeds": random(1, 8),
    }  # fmt: skip


def _hunyuan_dit():
    return diffusers.HunyuanDiT2DModel(
        **ATTENTION, in_channels=4, patch_size=2, sample_size=8, hidden_size=32, num_layers=2,
        cross_attention_dim=16, cross_attention_dim_t5=8, pooled_projection_dim=8, text_len=6,
        text_len_t5=6,
    ), {
        "hidden_states": image(), "timestep": step(), "image_rotary_emb": rotary(16),
        "encoder_hidden_states": text(16, 6), "text_embedding_mask": ones(6),
        "encoder_hidden_states_t5": text(8, 6), "text_embedding_mask_t5": padded(6),
        "image_meta_size": torch.ones(1, 6), "style": torch.tensor([0]),
    }  # fmt: skip


def _hunyuan_image():
    return diffusers.HunyuanImageTransformer2DModel(
        **ATTENTION, **FOUR, **BLOCKS, num_refiner_layers=1, text_embed_dim=16,
        rope_axes_dim=(8, 8),
    ), masked(image(side=4))  # fmt: skip


def _ideogram4():
    tokens = WORDS + 16
    return diffusers.Ideogram4Transformer2DModel(
        **ATTENTION, in_channels=4, num_layers=2, intermediate_size=32, adaln_dim=8,
        llm_features_dim=16, mrope_section=(4, 2, 2),
    ), {
        "hidden_states": random(1, tokens, 4), "encoder_hidden_states": text(16, tokens),
        "timestep": step(), "position_ids": torch.arange(tokens)[None, :, None].repeat(1, 1, 3),
        "segment_ids": torch.ones(1, tokens, dtype=torch.long),
        "indicator": (torch.arange(tokens) >= WORDS).long()[None] + 1,
    }  # fmt: skip


def _joyimage():
    return diffusers.JoyImageEditTransformer3DModel(
        in_channels=4, hidden_size=32, num_attention_heads=2, text_dim=16, num_layers=2,
        rope_dim_list=list(ROPE),
    ), latents(random(1, 1, 4, 1, 8, 8))  # fmt: skip


def _krea2():
    return diffusers.Krea2Transformer2DModel(
        in_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=32, timestep_embed_dim=16, text_hidden_dim=32,
        num_text_layers=2, text_num_attention_heads=2, text_num_key_value_heads=2,
        text_intermediate_size=32, num_layerwise_text_blocks=1, num_refiner_text_blocks=1,
        axes_dims_rope=ROPE,
    ), {
        **masked(random(1, 16, 4)), "encoder_hidden_states": random(1, WORDS, 2, 32),
        "position_ids": torch.arange(WORDS + 16)[:, None].repeat(1, 3),
    }  # fmt: skip


def _longcat():
    return diffusers.LongCatImageTransformer2DModel(
        **ATTENTION, **BLOCKS, in_channels=4, joint_attention_dim=16, pooled_projection_dim=8,
        axes_dims_rope=list(ROPE),
    ), with_ids()  # fmt: skip


def _lumina():
    return diffusers.LuminaNextDiT2DModel(
        sample_size=8, in_channels=4, hidden_size=32, num_layers=2, num_attention_heads=2,
        num_kv_heads=1, multiple_of=8, cross_attention_dim=16, learn_sigma=False,
    ), {
        **latents(image()), "encoder_mask": padded(), "cross_attention_kwargs": {},
        "image_rotary_emb": torch.polar(torch.ones(4, 4, 8), random(4, 4, 8)),
    }  # fmt: skip


def _lumina2():
    return diffusers.Lumina2Transformer2DModel(
        sample_size=8, in_channels=4, hidden_size=32, num_layers=2, num_refiner_layers=1,
        num_attention_heads=2, num_kv_heads=1, multiple_of=8, axes_dim_rope=ROPE,
        axes_lens=(64, 16, 16), cap_feat_dim=16,
    ), masked(image())  # fmt: skip


def _nucleus():
    return diffusers.NucleusMoEImageTransformer2DModel(
        **ATTENTION, in_channels=16, out_channels=4, num_layers=2, num_key_value_heads=1,
        joint_attention_dim=16, axes_dims_rope=ROPE, moe_enabled=False,
    ), {
        **latents(random(1, 16, 16)), "img_shapes": [(1, 4, 4)],
        "encoder_hidden_states_mask": padded(),
    }  # fmt: skip


def _omnigen():
    tokens = WORDS + 1 + 16
    return diffusers.OmniGenTransformer2DModel(
        in_channels=4, hidden_size=32, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=32, num_layers=2, pad_token_id=0, vocab_size=16, time_step_dim=16,
        rope_scaling={"long_factor": [1, 2, 3, 4], "short_factor": [1, 2, 3, 4]},
        pos_embed_max_size=8,
    ), {
        "hidden_states": image(), "timestep": step(), "input_ids": torch.arange(WORDS)[None],
        "input_img_latents": [image(side=4)], "input_image_sizes": {0: [[2, 6]]},
        "attention_mask": torch.ones(1, tokens, tokens).tril(),
        "position_ids": torch.arange(tokens)[None],
    }  # fmt: skip


def _ovis():
    return diffusers.OvisImageTransformer2DModel(
        **ATTENTION, **FOUR, **BLOCKS, joint_attention_dim=16, axes_dims_rope=ROPE
    ), with_ids()  # fmt: skip


def _pixart():
    return diffusers.PixArtTransformer2DModel(
        **ATTENTION, in_channels=4, out_channels=8, num_layers=2, cross_attention_dim=32,
        sample_size=8, caption_channels=16, use_additional_conditions=False,
    ), {
        **masked(image()), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}
    }  # fmt: skip


def _prior():
    return diffusers.PriorTransformer(
        **ATTENTION, num_layers=2, embedding_dim=8, num_embeddings=WORDS, additional_embeddings=4
    ), {
        "hidden_states": random(1, 8), "proj_embedding": random(1, 8), "attention_mask": padded(),
        "encoder_hidden_states": text(8), "timestep": torch.tensor([1]),
    }  # fmt: skip


def _prx():
    return diffusers.PRXTransformer2DModel(
        in_channels=4, context_in_dim=16, hidden_size=32, mlp_ratio=2.0, num_heads=2, depth=2,
        axes_dim=[8, 8],
    ), {**latents(image()), "attention_mask": padded()}  # fmt: skip


def _qwen():
    return diffusers.QwenImageTransformer2DModel(
        **ATTENTION, in_channels=16, out_channels=4, num_layers=2, joint_attention_dim=16,
        axes_dims_rope=ROPE,
    ), {
        **latents(random(1, 16, 16)), "img_shapes": [(1, 4, 4)],
        "encoder_hidden_states_mask": padded(),
    }  # fmt: skip


def _qwen21():
    return diffusers.QwenImage21Transformer2DModel(
        **ATTENTION, **FOUR, num_layers=2, context_in_dim=16, axes_dims_rope=ROPE
    ), {
        **latents(random(1, 16, 4)), "img_shapes": [[(1, 4, 4)]],
        "img_mask": (torch.arange(WORDS + 4) >= WORDS)[None],
        "encoder_hidden_states_mask": padded(),
    }  # fmt: skip


def _sana():
    return diffusers.SanaTransformer2DModel(
        **ATTENTION, **FOUR, num_layers=2, num_cross_attention_heads=2, sample_size=8,
        cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=16,
    ), masked(image())  # fmt: skip


def _z_image():
    return diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
        cap_feat_dim=16, axes_dims=list(ROPE), axes_lens=[64, 32, 32],
    ), {"x": [random(4, 1, 8, 8)], "t": step(), "cap_feats": [random(WORDS, 16)]}  # fmt: skip


IMAGES = {
    "auraflow": Family(_auraflow, 2),
    "bria": Family(_bria, 2),
    "bria_fibo": Family(_bria_fibo, 2),
    "cascade": Family(_cascade, 4),
    "chroma": Family(_chroma, 2),
    "cogview3": Family(_cogview3, 2),
    "cogview4": Family(_cogview4, 2),
    "dit": Family(_dit, 2),
    "ernie": Family(_ernie, 2),
    "flux2": Family(_flux2, 2),
    "flux2_kv": Family(_flux2_kv, 4),
    "flux3": Family(_flux3, 4),
    "glm_image": Family(_glm_image, 2),
    "hidream": Family(_hidream, 2),
    "hunyuan_dit": Family(_hunyuan_dit, 4),
    "hunyuan_image": Family(_hunyuan_image, 3),
    "ideogram4": Family(_ideogram4, 2),
    "joyimage": Family(_joyimage, 2),
    "krea2": Family(_krea2, 3),
    "longcat": Family(_longcat, 2),
    "lumina": Family(_lumina, 4),
    "lumina2": Family(_lumina2, 4),
    "nucleus": Family(_nucleus, 2),
    "omnigen": Family(_omnigen, 2),
    "ovis": Family(_ovis, 2),
    "pixart": Family(_pixart, 4),
    "prior": Family(_prior, 2),
    "prx": Family(_prx, 2),
    "qwen": Family(_qwen, 2),
    "qwen21": Family(_qwen21, 4),
    "sana": Family(_sana, 2, skipped=2),
    "z_image": Family(_z_image, 4),
}
