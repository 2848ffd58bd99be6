"""Tiny models of families that make videos or sounds."""

from __future__ import annotations

import diffusers
import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

from sage_plugin.kernels.fallback import Fallback, FallbackReason
from tests.plugin.tiny import random
from tests.plugin.tiny_inputs import (
    ATTENTION,
    BLOCKS,
    FOUR,
    ROPE,
    WORDS,
    Family,
    latents,
    masked,
    ones,
    padded,
    rotary,
    step,
    text,
    video,
)  # fmt: skip

WAN = {
    **ATTENTION, "patch_size": (1, 2, 2), "out_channels": 4, "text_dim": 16, "freq_dim": 16,
    "ffn_dim": 32,
}  # fmt: skip
HUNYUAN = {
    **ATTENTION, **FOUR, **BLOCKS, "num_refiner_layers": 1, "text_embed_dim": 16,
    "pooled_projection_dim": 8, "rope_axes_dim": ROPE,
}  # fmt: skip
FRAMES = torch.arange(2)
LONG = torch.tensor([1])

BLOCK_MASK = FallbackReason(Fallback.MASK_TYPE, "BlockMask")


def _ace_step():
    return diffusers.AceStepTransformer1DModel(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, in_channels=12, audio_acoustic_hidden_dim=4,
        sliding_window=4, encoder_hidden_size=16,
    ), {
        **latents(random(1, 32, 4)), "timestep_r": step(), "context_latents": random(1, 32, 8)
    }  # fmt: skip


def _allegro():
    found = get_3d_rotary_pos_embed_allegro(18, ((0, 0), (4, 4)), (4, 4), 2)
    places = torch.cartesian_prod(*(grid.long() for grid in found[3:])).T.reshape(3, 1, -1)
    return diffusers.AllegroTransformer3DModel(
        **FOUR, num_attention_heads=2, attention_head_dim=18, num_layers=1, cross_attention_dim=36,
        sample_width=8, sample_height=8, sample_frames=2, caption_channels=16,
    ), {**masked(video()), "image_rotary_emb": (found[:3], tuple(places))}  # fmt: skip


def _anyflow():
    return diffusers.AnyFlowTransformer3DModel(
        **WAN, in_channels=4, num_layers=2, rope_max_seq_len=32
    ), {
        **latents(random(1, 2, 4, 8, 8)), "timestep": torch.ones(1, 2, dtype=torch.long),
        "r_timestep": torch.zeros(1, 2, dtype=torch.long),
    }  # fmt: skip


def _anyflow_far():
    """Self-attention under a block mask, which only FlexAttention reads."""
    _, inputs = _anyflow()
    return diffusers.AnyFlowFARTransformer3DModel(
        **WAN, in_channels=4, num_layers=1, rope_max_seq_len=32, chunk_partition=(1, 1)
    ), {**inputs, "chunk_partition": [1, 1]}  # fmt: skip


def _chronoedit():
    return diffusers.ChronoEditTransformer3DModel(
        **WAN, in_channels=4, num_layers=2, rope_max_seq_len=32
    ), latents(video())  # fmt: skip


def _consisid():
    return diffusers.ConsisIDTransformer3DModel(
        **ATTENTION, **FOUR, time_embed_dim=2, text_embed_dim=16, num_layers=2, sample_width=8,
        sample_height=8, sample_frames=8, max_text_seq_length=WORDS,
    ), {**latents(random(1, 2, 4, 8, 8)), "timestep": LONG}  # fmt: skip


def _cosmos():
    return diffusers.CosmosTransformer3DModel(
        **ATTENTION, **FOUR, num_layers=2, mlp_ratio=2, text_embed_dim=16, adaln_lora_dim=4,
        max_size=(4, 8, 8), concat_padding_mask=False,
    ), {**latents(video()), "attention_mask": padded(), "fps": 8}  # fmt: skip


def _easyanimate():
    return diffusers.EasyAnimateTransformer3DModel(
        **ATTENTION, **FOUR, patch_size=2, sample_width=8, sample_height=8, num_layers=2,
        mmdit_layers=1, time_embed_dim=8, text_embed_dim=16,
    ), latents(video())  # fmt: skip


def _framepack():
    return diffusers.HunyuanVideoFramepackTransformer3DModel(
        **HUNYUAN, has_image_proj=True, image_proj_dim=8, has_clean_x_embedder=True
    ), {
        **masked(video()), "pooled_projections": random(1, 8), "guidance": step(),
        "image_embeds": text(8, 3), "indices_latents": FRAMES,
        "latents_clean": video(frames=1), "indices_latents_clean": torch.arange(1),
        "latents_history_2x": video(), "indices_latents_history_2x": FRAMES,
        "latents_history_4x": video(frames=4), "indices_latents_history_4x": torch.arange(4),
    }  # fmt: skip


def _helios():
    return diffusers.HeliosTransformer3DModel(
        **WAN, in_channels=4, num_layers=2, rope_dim=ROPE
    ), latents(video())  # fmt: skip


def _hunyuan_video():
    return diffusers.HunyuanVideoTransformer3DModel(**HUNYUAN), {
        **masked(video()), "pooled_projections": random(1, 8), "guidance": step()
    }  # fmt: skip


def _hunyuan_video15():
    return diffusers.HunyuanVideo15Transformer3DModel(
        **ATTENTION, **FOUR, num_layers=1, num_refiner_layers=1, text_embed_dim=16,
        text_embed_2_dim=8, image_embed_dim=8, rope_axes_dim=ROPE, target_size=8, task_type="t2v",
    ), {
        **masked(video(side=4)), "encoder_hidden_states_2": text(8, 6),
        "encoder_attention_mask_2": ones(6), "image_embeds": torch.zeros(1, 4, 8),
    }  # fmt: skip


def _kandinsky5():
    return diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4, in_text_dim=16, in_text_dim2=8, time_dim=16, out_visual_dim=4,
        model_dim=32, ff_dim=32, num_text_blocks=1, num_visual_blocks=1, axes_dims=ROPE,
    ), {
        **latents(random(1, 2, 8, 8, 4)), "pooled_projections": random(1, 8),
        "visual_rope_pos": [FRAMES, torch.arange(4), torch.arange(4)],
        "text_rope_pos": torch.arange(WORDS),
    }  # fmt: skip


def _latte():
    return diffusers.LatteTransformer3DModel(
        **ATTENTION, in_channels=4, out_channels=8, num_layers=1, cross_attention_dim=32,
        attention_bias=True, sample_size=8, patch_size=2, activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000, norm_type="ada_norm_single", norm_elementwise_affine=False,
        caption_channels=16, video_length=2,
    ), {**latents(video()), "timestep": LONG}  # fmt: skip


def _longcat_audio():
    return diffusers.LongCatAudioDiTTransformer(
        dit_dim=32, dit_depth=2, dit_heads=2, dit_text_dim=16, latent_dim=4
    ), {**masked(random(1, 24, 4)), "latent_cond": random(1, 24, 4)}  # fmt: skip


def _ltx():
    return diffusers.LTXVideoTransformer3DModel(
        **ATTENTION, **FOUR, cross_attention_dim=32, num_layers=1, caption_channels=16
    ), {**masked(random(1, 32, 4)), "num_frames": 2, "height": 4, "width": 4}  # fmt: skip


def _ltx2():
    return diffusers.LTX2VideoTransformer3DModel(
        **ATTENTION, **FOUR, cross_attention_dim=32, audio_in_channels=4, audio_out_channels=4,
        audio_num_attention_heads=2, audio_attention_head_dim=8, audio_cross_attention_dim=16,
        num_layers=1, caption_channels=16, base_height=32, base_width=32,
    ), {
        **masked(random(1, 32, 4)), "num_frames": 2, "height": 4, "width": 4,
        "audio_hidden_states": random(1, 6, 4), "audio_num_frames": 6,
        "audio_encoder_hidden_states": text(), "audio_encoder_attention_mask": padded(),
    }  # fmt: skip


def _mochi():
    return diffusers.MochiTransformer3DModel(
        **ATTENTION, in_channels=4, num_layers=2, pooled_projection_dim=16, text_embed_dim=16,
        time_embed_dim=8, max_sequence_length=WORDS,
    ), masked(video())  # fmt: skip


def _motif():
    return diffusers.MotifVideoTransformer3DModel(
        **ATTENTION, **FOUR, **BLOCKS, num_decoder_layers=1, text_embed_dim=16, rope_axes_dim=ROPE,
        enable_text_cross_attention_dual=True,
    ), masked(video())  # fmt: skip


def _motion():
    """AnimateDiff's UNet: attention along time follows each attention in space."""
    return diffusers.UNetMotionModel(
        **FOUR, sample_size=4, block_out_channels=(16,), layers_per_block=1,
        down_block_types=("CrossAttnDownBlockMotion",),
        up_block_types=("CrossAttnUpBlockMotion",), cross_attention_dim=16,
        num_attention_heads=2, norm_num_groups=8, motion_num_attention_heads=2,
        motion_max_seq_length=4,
    ), {
        "sample": video(side=4), "timestep": step(),
        "encoder_hidden_states": text().repeat(2, 1, 1),
    }  # fmt: skip


def _sana_video():
    return diffusers.SanaVideoTransformer3DModel(
        **ATTENTION, **FOUR, num_layers=2, num_cross_attention_heads=2, sample_size=8,
        cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=16,
        rope_max_seq_len=32,
    ), masked(video())  # fmt: skip


def _sana_wm():
    return diffusers.SanaWMTransformer3DModel(
        in_channels=4, num_layers=2, hidden_size=32, num_attention_heads=2, softmax_every_n=2,
        linear_head_dim=16, caption_channels=16,
    ), {
        **masked(video()), "encoder_hidden_states": text()[:, None], "timestep": torch.ones(1, 1, 2)
    }  # fmt: skip


def _skyreels():
    return diffusers.SkyReelsV2Transformer3DModel(
        **WAN, in_channels=4, num_layers=2, rope_max_seq_len=32
    ), {**latents(video()), "timestep": LONG}  # fmt: skip


def _skyreels_causal():
    """A mask lets each block of two frames see the earlier ones."""
    return diffusers.SkyReelsV2Transformer3DModel(
        **WAN, in_channels=4, num_layers=2, rope_max_seq_len=32, inject_sample_info=True,
        num_frame_per_block=2,
    ), {**latents(video(frames=4)), "timestep": LONG, "fps": [0]}  # fmt: skip


def _stable_audio():
    return diffusers.StableAudioDiTModel(
        sample_size=16, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        num_key_value_attention_heads=1, out_channels=4, cross_attention_dim=16, time_proj_dim=16,
        global_states_input_dim=16, cross_attention_input_dim=16,
    ), {
        **latents(random(1, 4, 16)), "global_hidden_states": text(16, 1),
        "rotary_embedding": rotary(17, 8),
    }  # fmt: skip


def _stable_audio3():
    return diffusers.StableAudio3DiTModel(
        io_channels=4, embed_dim=32, depth=2, num_heads=2, cond_token_dim=16, global_cond_dim=16,
        local_add_cond_dim=4, timestep_features_dim=16, num_memory_tokens=4,
    ), {**latents(random(1, 4, 16)), "global_hidden_states": random(1, 16)}  # fmt: skip


def _wan_animate():
    return diffusers.WanAnimateTransformer3DModel(
        **WAN, in_channels=12, latent_channels=4, num_layers=2, image_dim=8, rope_max_seq_len=32,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8}, motion_encoder_size=16,
        motion_style_dim=8, motion_dim=4, motion_encoder_dim=16, face_encoder_hidden_dim=16,
        face_encoder_num_heads=2, inject_face_latents_blocks=2,
    ), {
        **latents(video(12)), "encoder_hidden_states_image": text(8, 257),
        "pose_hidden_states": video(frames=1), "face_pixel_values": video(3, 4, 16),
    }  # fmt: skip


def _wan_i2v():
    """The text and the image are attended to in two calls of one processor."""
    return diffusers.WanTransformer3DModel(
        **WAN, in_channels=4, num_layers=1, image_dim=8, added_kv_proj_dim=32, rope_max_seq_len=32
    ), {**latents(video()), "encoder_hidden_states_image": text(8, 257)}  # fmt: skip


def _wan_vace():
    return diffusers.WanVACETransformer3DModel(
        **WAN, in_channels=4, num_layers=2, vace_layers=[0], vace_in_channels=4, rope_max_seq_len=32
    ), {
        **latents(video()), "control_hidden_states": video(),
        "control_hidden_states_scale": torch.ones(1),
    }  # fmt: skip


VIDEOS = {
    "ace_step": Family(_ace_step, 4),
    "allegro": Family(_allegro, 2),
    "anyflow": Family(_anyflow, 4),
    "anyflow_far": Family(_anyflow_far, 2, fallbacks={BLOCK_MASK: 1}, flex=1),
    "chronoedit": Family(_chronoedit, 4),
    "consisid": Family(_consisid, 2),
    "cosmos": Family(_cosmos, 4),
    "easyanimate": Family(_easyanimate, 2),
    "framepack": Family(_framepack, 3),
    "helios": Family(_helios, 4),
    "hunyuan_video": Family(_hunyuan_video, 3),
    "hunyuan_video15": Family(_hunyuan_video15, 2),
    "kandinsky5": Family(_kandinsky5, 3),
    "latte": Family(_latte, 3),
    "longcat_audio": Family(_longcat_audio, 4),
    "ltx": Family(_ltx, 2),
    "ltx2": Family(_ltx2, 6),
    "mochi": Family(_mochi, 3),
    "motif": Family(_motif, 3),
    "motion": Family(_motion, 16),
    "sana_video": Family(_sana_video, 2, skipped=2),
    "sana_wm": Family(_sana_wm, 3),
    "skyreels": Family(_skyreels, 4),
    "skyreels_causal": Family(_skyreels_causal, 4),
    "stable_audio": Family(_stable_audio, 4),
    "stable_audio3": Family(_stable_audio3, 8),
    "wan_animate": Family(_wan_animate, 5),
    "wan_i2v": Family(_wan_i2v, 3),
    "wan_vace": Family(_wan_vace, 6),
}
