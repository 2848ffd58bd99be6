"""`benchmarks/grouped_rates.py`: what it times, and what a row says."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sage_plugin.families.grouped_linear.replay import drawn
from sage_plugin.schema import LinearShape
from tests.benchmarks.stubs import half_milliseconds
from tests.kernels.grouped_linear.cases import exact

WAYS = ["torch", "fp8_row", "fp8_row alone", "tokens, bf16", "tokens, fp8_row"]


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("grouped_rates")
    monkeypatch.setattr(module, "MODELS", {"small": module.Mixture(4, 2, 64, 24)})
    monkeypatch.setattr(module, "TOKENS", (8,))

    monkeypatch.setattr(module, "measure", half_milliseconds)
    return module


def test_each_way_computes_the_experts(rates: ModuleType) -> None:
    call = drawn(LinearShape(32, 64, 48, "float32", groups=4), "cpu")
    torch.manual_seed(0)
    ways = {name: way() for name, way in rates.calls_of(call, 2, ["fp8_row"]).items()}
    assert list(ways) == WAYS
    expected = exact(call.x, call.weight, call.group_sizes)
    for name, out in ways.items():
        of_tokens = ways["tokens, bf16"].double()
        reference = of_tokens if name.startswith("tokens") else expected
        assert (out - reference).norm() < 0.05 * reference.norm(), name


def test_the_file_has_every_routing(
    rates: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(rates, "KERNELS", ("fp8_row",))
    monkeypatch.setattr(rates, "identity", lambda *_: {"torch": torch.__version__})
    monkeypatch.setattr(
        rates, "on_gpu", lambda _, args, why: argparse.Namespace(**vars(args), device="cpu")
    )
    path = tmp_path / "rates.json"
    assert rates.main(["--output", str(path), "--models", "sm"]) == 0
    even, skewed = json.loads(path.read_text())["rows"]
    assert (even["routing"], even["largest_group"], even["ms"]["fp8_row"]) == ("even", 4, 1.0)
    assert skewed["largest_group"] > 4
    assert even["tflops"]["torch"] == pytest.approx(2 * 16 * 64 * 48 / 0.5e-3 * 1e-12)
    assert "tokens, fp8_row 0 (0.80x)" in rates.line_of(even)
