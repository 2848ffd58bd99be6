"""Shipped configs of linears, experts and pages serve the calls that popular models make."""

from __future__ import annotations

import pytest

from sage_plugin.families import family
from sage_plugin.paged_records import PagedShape
from sage_plugin.registry import load, lookup
from sage_plugin.schema import LinearShape, RegistryFile
from tests.registry.test_shipped import CARDS


def linear(rows: int, channels: int, out: int, groups: int = 0) -> LinearShape:
    return LinearShape(rows, channels, out, "bfloat16", groups=groups)


def served(sequences: int, keys: int, page: int, cache: str, prompt: int = 1) -> PagedShape:
    """A batch of Llama 3.1 8B or Qwen3 8B: all sequences decode, or one has a prompt."""
    rows = (*(1,) * (sequences - 1), prompt)
    return PagedShape(rows, (keys,) * sequences, 32, 8, 128, "bfloat16", cache, page, keys)


SIGNATURES = {
    "linear": ("int8_row", {
        "Flux 1024x1024, projections": linear(4608, 3072, 3072),
        "Flux 1024x1024, feed-forward up": linear(4608, 3072, 12288),
        "Flux 1024x1024, feed-forward down": linear(4608, 12288, 3072),
        "Llama 3.1 8B, 2k prompt, query": linear(2048, 4096, 4096),
        "Llama 3.1 8B, 8k prompt, up": linear(8192, 4096, 14336),
        "Llama 3.1 8B, 4k prompt, down": linear(4096, 14336, 4096),
        "Wan 2.1 14B 480p, projections": linear(32760, 5120, 5120),
        "Wan 2.1 14B 480p, feed-forward up": linear(32760, 5120, 13824),
        "Wan 2.1 14B 480p, feed-forward down": linear(32760, 13824, 5120),
        "CogVideoX-5B 480p, feed-forward up": linear(35552, 3072, 12288),
        "CogVideoX-5B 480p, projections": linear(35552, 3072, 3072),
    }),
    "grouped_linear": ("fp8_row", {
        "Qwen3 30B A3B, 128 tokens, up": linear(1024, 2048, 1536, 128),
        "Qwen3 30B A3B, 128 tokens, down": linear(1024, 768, 2048, 128),
        "Qwen3 30B A3B, 4k prompt, up": linear(32768, 2048, 1536, 128),
        "Qwen3 30B A3B, 8k prompt, down": linear(65536, 768, 2048, 128),
        "Mixtral 8x7B, 128 tokens, up": linear(256, 4096, 28672, 8),
        "Mixtral 8x7B, 4k prompt, up": linear(8192, 4096, 28672, 8),
        "Mixtral 8x7B, 2k prompt, down": linear(4096, 14336, 4096, 8),
    }),
    "paged_attention": ("fav2", {
        "32 sequences of 8k, pages of 256": served(32, 8192, 256, "bfloat16"),
        "64 sequences of 16k, pages of 64": served(64, 16384, 64, "bfloat16"),
        "16 sequences of 4k, pages of 256, FP8": served(16, 4096, 256, "float8_e4m3fn"),
        "32 sequences of 8k, pages of 64, FP8": served(32, 8192, 64, "float8_e4m3fn"),
        "32 sequences of 8k, pages of 256, INT8": served(32, 8192, 256, "int8"),
        "a prompt among 32, FP8": served(32, 8192, 256, "float8_e4m3fn", 2048),
        "a prompt among 16, INT8": served(16, 8192, 256, "int8", 4000),
    }),
}  # fmt: skip
"""Kernel and calls by op family; those of a family whose file a card lacks have defaults."""

CALLS = [(op, name) for op, (_, calls) in SIGNATURES.items() for name in calls]


def shipped(card: str, op: str) -> RegistryFile:
    folder = load.shipped_dir()
    assert folder is not None
    path = load.file_path(folder, card, op)
    if not path.exists():
        pytest.skip(f"{card} has no shipped configs of {op}")
    return load.read(path)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(("op", "name"), CALLS)
def test_a_popular_call_finds_a_shipped_config(card: str, op: str, name: str) -> None:
    folder = load.shipped_dir()
    assert folder is not None
    facts, one = load.read(load.file_path(folder, card)).device, family(op)
    kernel, calls = SIGNATURES[op]
    decision = one.decide(calls[name], facts, kernel=kernel)
    assert decision.label == f"{kernel}:triton"  # on what a config is for
    key = one.call_key(calls[name], decision)
    assert one.illegal_reason(one.default_launch(key, facts), key, facts) is None
    shipped(card, op)
    match = lookup.find(key, facts=facts)
    assert match is not None
    assert match.label == "shipped"
    assert one.illegal_reason(match.entry.config, key, facts) is None


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("op", SIGNATURES)
def test_no_shipped_config_is_out_of_reach(card: str, op: str) -> None:
    file, one = shipped(card, op), family(op)
    assert file.entries
    for entry in file.entries:
        shape = one.shape_of(entry.key)
        decision = one.decide(shape, file.device, kernel=entry.key.kernel)
        assert one.call_key(shape, decision) == entry.key
        match = lookup.find(entry.key, facts=file.device)
        assert match is not None
        assert match.entry == entry
        assert bool(entry.evidence.measured_on) == (card != CARDS[0])
