"""`benchmarks/small_mixture.py`: it trains, patches experts alone, and tells of their use."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")


def test_a_mixture_is_trained_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("small_mixture")
    monkeypatch.setattr(module, "LENGTH", 16)
    monkeypatch.setattr(module, "BATCH", 4)
    path = tmp_path / "mixture.json"
    assert module.main(["--output", str(path), "--steps", "3"]) == 0
    found = json.loads(path.read_text())
    exact = found["perplexity"].pop("fp32")
    assert exact < 128  # that of letters at random
    for kernel, perplexity in found["perplexity"].items():
        assert perplexity == pytest.approx(exact, rel=0.01), kernel
        # Eight pieces of text; so few steps leave no error that perplexity surely shows.
        assert found["calls"][kernel] == {
            f"model.model.layers.{layer}.mlp.experts": 8 for layer in (0, 1)
        }
    assert [sum(shares) for shares in found["shares"].values()] == pytest.approx([1.0, 1.0])
