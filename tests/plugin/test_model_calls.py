"""A model's configuration says which attention calls it makes."""

from __future__ import annotations

import json

import pytest

from sage_plugin.errors import ConfigError, UsageError
from sage_plugin.plugin.plan.model_calls import CallWishes, calls_of, local_shape, read_config
from tests.registry.test_shipped import SIGNATURES


def denoiser(name: str, heads: int, dim: int, layers: int, **more: object) -> dict[str, object]:
    return {
        "_class_name": name, "num_attention_heads": heads, "attention_head_dim": dim,
        "num_layers": layers, **more,
    }  # fmt: skip


COGVIDEOX = denoiser(
    "CogVideoXTransformer3DModel", 30, 64, 30, sample_width=90, sample_height=60,
    sample_frames=49, patch_size=2, max_text_seq_length=226,
)  # fmt: skip
WAN = denoiser("WanTransformer3DModel", 12, 128, 30, in_channels=16)
WAN_5B = denoiser("WanTransformer3DModel", 24, 128, 30, in_channels=48)
FLUX = denoiser("FluxTransformer2DModel", 24, 128, 19, num_single_layers=38)
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "num_hidden_layers": 32, "torch_dtype": "float16",
}  # fmt: skip
LONG = CallWishes(seq_lens=(16_384,))


@pytest.mark.parametrize(
    ("config", "wishes", "signature"),
    [
        (COGVIDEOX, CallWishes(), "CogVideoX-2B 480p"),
        (COGVIDEOX, CallWishes(batch=1), "CogVideoX-2B 480p, one prompt"),
        (WAN, CallWishes(), "Wan 2.1 1.3B 480p"),
        (WAN_5B, CallWishes(pixels=(1280, 704), frames=121), "Wan 2.2 5B 720p"),
        (denoiser("WanTransformer3DModel", 40, 128, 40), CallWishes(pixels=(1280, 720)),
         "Wan 2.1 14B 720p"),
        (denoiser("HunyuanVideoTransformer3DModel", 24, 128, 20, num_single_layers=40),
         CallWishes(), "HunyuanVideo 720p"),
        (denoiser("MochiTransformer3DModel", 24, 128, 48), CallWishes(frames=163, batch=1),
         "Mochi 480p"),
        (FLUX, CallWishes(pixels=(2048, 2048)), "Flux 2048x2048"),
        (denoiser("QwenImageTransformer2DModel", 24, 128, 60), CallWishes(pixels=(2048, 2048)),
         "Qwen-Image 2048x2048"),
        (LLAMA, LONG, "Llama 3.1 8B, 16k prompt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_calls_of_known_models(config, wishes, signature):
    shape = calls_of(config, wishes)[0].shape
    sizes = (shape.batch, shape.heads_q, shape.heads_k, shape.seq_q, shape.head_dim, shape.causal)
    assert sizes == SIGNATURES[signature]
    assert shape.scale == shape.head_dim**-0.5


def test_layers_text_and_dtypes():
    own, across = calls_of(WAN)
    assert (own.kind, own.layers, across.kind, across.layers) == ("self", 30, "cross", 30)
    assert (across.shape.seq_q, across.shape.seq_k) == (32_760, 512)
    (joint,) = calls_of(FLUX, CallWishes(dtype="float16"))
    assert (joint.layers, joint.shape.seq_q, joint.shape.dtype) == (57, 4096 + 512, "float16")
    assert calls_of(LLAMA, LONG)[0].shape.dtype == "float16"
    (encoder,) = calls_of({**LLAMA, "architectures": ["BertForMaskedLM"], "head_dim": 64}, LONG)
    assert (encoder.shape.causal, encoder.shape.head_dim) == (False, 64)
    (inner,) = calls_of({"text_config": LLAMA, "model_type": "seer"}, LONG)
    assert inner.layers == 32
    unknown = denoiser("NewTransformer", 8, 64, 4)
    assert [c.shape.seq_q for c in calls_of(unknown, CallWishes(seq_lens=(64, 128)))] == [64, 128]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (denoiser("NewTransformer", 8, 64, 4), "how many tokens NewTransformer makes is not known"),
        ({**WAN, "num_attention_heads": None}, "no usable num_attention_heads"),
        ({**WAN, "num_layers": True}, "no usable num_layers"),
        (LLAMA, "has no length of its own: give one with --seq-len"),
        ({**LLAMA, "num_key_value_heads": 5}, "32 heads are no multiple of 5"),
        ({**LLAMA, "kv_lora_rank": 512}, "latent attention"),
        ({}, "no usable num_attention_heads"),
    ],
)
def test_what_a_configuration_does_not_say_is_named(config, says):
    with pytest.raises(UsageError, match=says):
        calls_of(config)


def test_a_configuration_is_found_in_a_model_and_in_a_pipeline(tmp_path):
    (tmp_path / "transformer").mkdir()
    for place in (tmp_path / "transformer" / "config.json", tmp_path / "config.json"):
        place.write_text(json.dumps({**WAN, "num_layers": len(str(place))}))
        assert read_config(tmp_path)["num_layers"] == len(str(place))
        assert read_config(place)["num_layers"] == len(str(place))
    with pytest.raises(UsageError, match=r"no config\.json"):
        read_config(tmp_path / "absent")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        read_config(tmp_path)


def test_the_part_of_one_device():
    (whole,) = calls_of(LLAMA, LONG)
    part = local_shape(whole.shape, 4)
    assert (part.heads_q, part.heads_k, part.seq_q, part.seq_k) == (8, 2, 16_384, 16_384)
    part = local_shape(whole.shape, 4, "seq")
    assert (part.heads_q, part.heads_k, part.seq_q, part.seq_k) == (32, 8, 4096, 16_384)
    assert local_shape(whole.shape, 1) == whole.shape


@pytest.mark.parametrize(
    ("devices", "split", "says"),
    [
        (16, "heads", "--tp-size 16 does not divide heads_k 8"),
        (3, "heads", "--tp-size 3 does not divide heads_q 32"),
        (5, "seq", "--tp-size 5 does not divide seq_q 16384"),
        (0, "heads", "--tp-size 0: must be at least 1"),
        (2, "rows", "--tp-split-dim 'rows': allowed are heads, seq"),
    ],
)
def test_what_does_not_divide_is_an_error(devices, split, says):
    with pytest.raises(UsageError, match=says):
        local_shape(calls_of(LLAMA, LONG)[0].shape, devices, split)
