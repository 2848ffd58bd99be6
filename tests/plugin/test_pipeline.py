"""A whole diffusers pipeline, two denoisers and a VAE, patched for a run."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers

import sage_plugin
from sage_plugin.plugin.hosts.diffusers import find_denoisers

STEPS, LAYERS = 4, 2


def wan_pipeline():
    torch.manual_seed(0)
    first, second = (
        diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=16,
            out_channels=16, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=1,
            cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
        )
        for _ in range(2)
    )  # fmt: skip
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )  # fmt: skip
    pipe = diffusers.WanPipeline(
        tokenizer=None, text_encoder=None, vae=vae, transformer=first, transformer_2=second,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0), boundary_ratio=0.875,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe):
    return pipe(
        prompt_embeds=torch.ones(1, 8, 16), height=16, width=16, num_frames=9,
        num_inference_steps=STEPS, guidance_scale=1.0, output_type="latent",
        generator=torch.Generator().manual_seed(0),
    ).frames  # fmt: skip


def test_a_pipeline_is_patched_for_a_run_and_back():
    pipe = wan_pipeline()
    assert list(find_denoisers(pipe)) == ["transformer", "transformer_2"]
    host = generate(pipe)
    with sage_plugin.patched(pipe, kernel="sage", min_seq=0) as handle:
        ours = generate(pipe)
        twin = diffusers.WanPipeline(**pipe.components, boundary_ratio=0.875)
        assert sage_plugin.report(twin) == handle.report()  # the modules are the same
    assert not torch.equal(ours, host)
    torch.testing.assert_close(ours, host, rtol=0, atol=1e-2)
    assert torch.equal(generate(pipe), host)
    report = handle.report()
    assert report.kernel_calls() == report.total_calls() == STEPS * LAYERS
    assert {row.layer.split(".")[0] for row in report.rows} == {"transformer", "transformer_2"}
    assert all(row.total_calls() > 0 for row in report.rows)


def test_sdpa_by_name_generates_the_same_bits():
    pipe = wan_pipeline()
    host = generate(pipe)
    with sage_plugin.patched(pipe, kernel="sdpa") as handle:
        assert torch.equal(generate(pipe), host)
    assert handle.report().total_calls() == STEPS * LAYERS
