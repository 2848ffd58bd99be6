"""Shipped configs of linears, experts and pages serve the calls that popular models make."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sage_plugin.errors import ConfigError
from sage_plugin.families import family
from sage_plugin.paged_records import PagedShape
from sage_plugin.registry import load, lookup
from sage_plugin.registry.store import text_of
from sage_plugin.schema import LinearShape, RegistryFile
from scripts import sibling_configs
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


def test_a_sibling_gets_what_the_same_chip_measured(tmp_path: Path) -> None:
    folder = load.shipped_dir()
    assert folder is not None
    source = load.file_path(folder, CARDS[0])
    path = sibling_configs.write(source, CARDS[1], tmp_path)
    assert path == tmp_path / CARDS[1] / "attention.json"
    made, measured = load.read(path), load.read(source)
    assert made.device == load.read(load.file_path(folder, CARDS[1])).device
    assert [e.config for e in made.entries] == [e.config for e in measured.entries]
    assert {e.evidence.measured_on for e in made.entries} == {"NVIDIA H200"}
    other = tmp_path / "other.json"
    text = source.read_text().replace('"sm_count": 132', '"sm_count": 114')
    other.write_text(text)
    with pytest.raises(ConfigError, match="is no sibling of nvidia-h200: sm_count differ"):
        sibling_configs.write(other, CARDS[1], tmp_path)


def test_what_a_sibling_measured_itself_stays(tmp_path: Path) -> None:
    folder = load.shipped_dir()
    assert folder is not None
    held = load.read(load.file_path(folder, CARDS[1]))
    path = load.file_path(tmp_path, CARDS[1])
    path.parent.mkdir()
    own = replace(held.entries[0], evidence=replace(held.entries[0].evidence, measured_on=""))
    path.write_text(text_of(replace(held, entries=(own,))))
    sibling_configs.write(load.file_path(folder, CARDS[0]), CARDS[1], tmp_path)
    entries = {entry.key: entry for entry in load.read(path).entries}
    assert len(entries) > 1
    assert entries[own.key].evidence == own.evidence
