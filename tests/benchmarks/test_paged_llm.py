"""`benchmarks/paged_llm.py`: a model that reads pages is the model, numbers are in its text."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers")

import itertools

from tests.plugin.tiny_transformers import tiny


@pytest.fixture
def paged_llm() -> ModuleType:
    return importlib.import_module("paged_llm")


@pytest.mark.parametrize("kernel", ["fav2", "gathered"])
def test_pages_are_read_again_behind_what_they_hold(paged_llm: ModuleType, kernel: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    network = tiny("llama").module
    ids = torch.randint(1, 60, (1, 90), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = network(input_ids=ids).logits[0]
    pages = paged_llm.Pages(None, kernel, 128)
    AttentionInterface.register(paged_llm.NAME, pages.attention)
    AttentionMaskInterface.register(paged_llm.NAME, AttentionMaskInterface()["sdpa"])
    network.set_attn_implementation(paged_llm.NAME)
    first = paged_llm.logits_of(network, pages, ids[:, :70])
    torch.testing.assert_close(first, expected[:70], rtol=1e-4, atol=1e-4)
    pages.seen = 70
    for _ in range(2):  # what is asked twice is written over
        rest = paged_llm.logits_of(network, pages, ids[:, 70:])
        torch.testing.assert_close(rest, expected[70:], rtol=1e-4, atol=1e-4)


def test_numbers_are_spread_over_the_text(paged_llm: ModuleType) -> None:
    text, numbers = paged_llm.facts_in("A sentence. " * 40, 8)
    places = [text.index(f"of {city} is {number}.") for city, number in numbers.items()]
    gaps = [b - a for a, b in itertools.pairwise(places)]
    assert len(numbers) == 8
    assert min(gaps) > 0.5 * max(gaps)
