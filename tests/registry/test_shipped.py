"""Shipped configs serve the calls that users make, in both 16-bit dtypes and both layouts."""

from __future__ import annotations

import functools
import itertools

import pytest

from sage_plugin.kernels.attention import dispatch
from sage_plugin.registry import load, lookup
from sage_plugin.schema import CallShape

SIGNATURES = {
    # model and size: batch, query heads, key heads, queries, channels, causal
    "CogVideoX-2B 480p": (2, 30, 30, 17_776, 64, False),
    "CogVideoX-5B 480p": (2, 48, 48, 17_776, 64, False),
    "CogVideoX-2B 480p, one prompt": (1, 30, 30, 17_776, 64, False),
    "CogVideoX-5B 480p, 25 frames": (2, 48, 48, 9_676, 64, False),
    "Wan 2.1 1.3B 480p": (1, 12, 12, 32_760, 128, False),
    "Wan 2.1 1.3B 480p, both prompts": (2, 12, 12, 32_760, 128, False),
    "Wan 2.1 14B 480p": (1, 40, 40, 32_760, 128, False),
    "Wan 2.1 14B 720p": (1, 40, 40, 75_600, 128, False),
    "Wan 2.2 5B 720p": (1, 24, 24, 27_280, 128, False),
    "Wan 2.2 A14B 720p": (1, 40, 40, 75_600, 128, False),
    "HunyuanVideo 720p": (1, 24, 24, 119_056, 128, False),
    "HunyuanVideo 540p, short": (1, 24, 24, 16_452, 128, False),
    "HunyuanVideo 1.5 720p": (1, 16, 16, 110_880, 128, False),
    "Mochi 480p": (1, 24, 24, 44_776, 128, False),
    "SkyReels V2 540p": (1, 40, 40, 36_960, 128, False),
    "Allegro 720p": (1, 24, 24, 19_800, 96, False),
    "Flux 2048x2048": (1, 24, 24, 16_896, 128, False),
    "Flux 1536x1536": (1, 24, 24, 9_728, 128, False),
    "Qwen-Image 2048x2048": (1, 24, 24, 16_640, 128, False),
    "Chroma 2048x2048": (1, 24, 24, 16_896, 128, False),
    "Flux.1 Kontext 1024x1024": (1, 24, 24, 8_704, 128, False),
    "Flux.2 2048x2048": (1, 48, 48, 16_896, 128, False),
    "Qwen-Image-Edit 1328x1328": (1, 24, 24, 14_290, 128, False),
    "Z-Image 2048x2048": (1, 30, 30, 16_896, 128, False),
    "Lumina 2 2048x2048": (1, 24, 24, 16_640, 96, False),
    "SDXL 2048x2048": (2, 10, 10, 16_384, 64, False),
    "LTX-Video 1216x704, 161 frames": (1, 32, 32, 17_556, 64, False),
    "Cosmos 1 7B 704p": (1, 32, 32, 56_320, 128, False),
    "SkyReels V2 720p": (1, 40, 40, 90_000, 128, False),
    "Wan 2.1 14B 480p on 2 GPUs": (1, 20, 20, 32_760, 128, False),
    "Llama 3.1 8B, 16k prompt": (1, 32, 8, 16_384, 128, True),
    "Llama 3.1 8B, 32k prompt": (1, 32, 8, 32_768, 128, True),
    "Llama 3.1 8B, 8k prompt": (1, 32, 8, 8_192, 128, True),
    "Mistral 7B, 16k prompt": (1, 32, 8, 16_384, 128, True),
    "Qwen3 8B, 16k prompt": (1, 32, 8, 16_384, 128, True),
    "Qwen3 8B, batch of 4, 8k": (4, 32, 8, 8_192, 128, True),
    "Qwen3 4B, 16k prompt": (1, 32, 8, 16_384, 128, True),
    "Mistral Small 24B, 16k prompt": (1, 32, 8, 16_384, 128, True),
    "Llama 3.1 8B on 2 GPUs, 16k prompt": (1, 16, 4, 16_384, 128, True),
    "Phi-3 mini, 16k prompt": (1, 32, 32, 16_384, 96, True),
    "Flux 1024x1024": (1, 24, 24, 4_608, 128, False),
    "Qwen-Image 1328x1328": (1, 24, 24, 7_145, 128, False),
    "Stable Diffusion 3.5 Large 1024x1024": (2, 38, 38, 4_429, 64, False),
    "CogVideoX 1.5 5B 768p": (2, 48, 48, 45_106, 64, False),
    "LTX-Video 768x512, 97 frames": (2, 32, 32, 4_992, 64, False),
    "Llama 3.1 8B, 96k prompt": (1, 32, 8, 98_304, 128, True),
    "Llama 3.1 70B, 16k prompt": (1, 64, 8, 16_384, 128, True),
    "Llama 3.1 70B, 64k prompt": (1, 64, 8, 65_536, 128, True),
    "Qwen3 32B, 16k prompt": (1, 64, 8, 16_384, 128, True),
    "Qwen2.5 7B, 16k prompt": (1, 28, 4, 16_384, 128, True),
    "gpt-oss 120B, 16k prompt": (1, 64, 8, 16_384, 64, True),
    "Llama 3.2 1B, 16k prompt": (1, 32, 8, 16_384, 64, True),
    "GPT of 64 channels, 16k prompt": (2, 30, 30, 16_384, 64, True),
}
CARDS = ("nvidia-h200", "nvidia-h100-80gb-hbm3")


def shapes(signature):
    batch, heads_q, heads_k, seq, dim, causal = signature
    for dtype, layout in itertools.product(("float16", "bfloat16"), ("bhsd", "bshd")):
        yield CallShape(
            batch, heads_q, heads_k, seq, seq, dim, dim, dtype, causal, "none", layout, dim**-0.5
        )


@functools.cache
def facts_of(card):
    return load.read(load.file_path(load.shipped_dir(), card)).device


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("signature", SIGNATURES.values(), ids=SIGNATURES)
def test_auto_finds_a_shipped_config(card, signature):
    facts = facts_of(card)
    for shape in shapes(signature):
        decision = dispatch.decide(shape, facts)
        assert decision.label == "fav3_sage:hopper"
        key = dispatch.call_key(shape, decision)
        match = lookup.find(key, facts=facts)
        assert match is not None
        assert match.label == "shipped"
        assert dispatch.illegal_reason(match.entry.config, key, facts) is None


def test_what_another_card_measured_is_marked():
    entries = load.read(load.file_path(load.shipped_dir(), CARDS[1])).entries
    marked = {entry.key.variant: entry.evidence.measured_on for entry in entries}
    assert marked == {"portable": "", "hopper": "NVIDIA H200"}
