"""`benchmarks/generation.py`: where two texts part, and what ran on a kernel meanwhile."""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers")

from tests.plugin.tiny_transformers import tiny


@pytest.fixture
def generation() -> ModuleType:
    return importlib.import_module("generation")


def test_the_first_difference_counts_and_its_gap(generation: ModuleType) -> None:
    logits = torch.tensor([[0.0, 4.0, 1.0], [2.0, 0.0, 1.5], [9.0, 0.0, 0.0]])
    expected = torch.tensor([1, 0, 0])
    assert generation.parting(torch.tensor([1, 2, 1]), expected, logits) == (1, 0.5)
    assert generation.parting(expected, expected, logits) == (None, None)


def test_prompt_and_tokens_are_told_apart(
    generation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "SHORTEST", (32, 1))
    network = tiny("llama").module
    prompt = torch.randint(1, 60, (1, 40), generator=torch.Generator().manual_seed(0))
    args = argparse.Namespace(kernels=["fav2"], tokens=5)
    long, short = generation.rows_of(network, prompt, args)
    assert long["layers"] == short["layers"] > 1
    assert long["kernel_calls"] == long["layers"]
    assert short["kernel_calls"] == 5 * short["layers"]
    assert long["parts_at"] is short["parts_at"] is None
    assert long["same_tokens"] == 5
    assert long["first_logits_max_error"] < 1e-4 < long["first_logits_spread"]
