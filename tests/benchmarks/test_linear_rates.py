"""`benchmarks/linear_rates.py`: what it times, and what a row says."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sage_plugin.families.linear.replay import drawn
from sage_plugin.schema import LinearShape
from tests.benchmarks.stubs import half_milliseconds

SHAPE = (32, 64, 48)
NAMES = ["bf16", "gelu, bf16", "fp8_row", "fp8_row alone", "gelu, fp8_row"]


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("linear_rates")
    monkeypatch.setattr(module, "SHAPES", {"small up": SHAPE, "small down": (32, 48, 64)})

    monkeypatch.setattr(module, "measure", half_milliseconds)
    return module


def test_each_way_computes_the_linear(rates: ModuleType) -> None:
    call = drawn(LinearShape(*SHAPE, "float32", bias=True), "cpu")
    ways = {name: way() for name, way in rates.calls_of(call, ["fp8_row"]).items()}
    assert [name for name in ways if name != "torchao"] == NAMES
    exact = torch.nn.functional.linear(call.x, call.weight, call.bias)
    gelu = torch.nn.functional.gelu(call.x, approximate="tanh")
    after = torch.nn.functional.linear(gelu, call.weight, call.bias)
    for name, out in ways.items():
        expected = after if name.startswith("gelu") else exact
        assert (out - expected).norm() < 0.05 * expected.norm(), name
    assert torch.equal(ways["fp8_row"], ways["fp8_row alone"])


def test_a_row_has_times_and_rates(rates: ModuleType) -> None:
    args = argparse.Namespace(device="cpu", method="wall", budget=0.1, kernels=["fp8_row"])
    found = rates.row("small up", args)
    assert found["shape"]["in_features"] == 64
    assert found["ms"]["fp8_row"] == 1.5
    assert found["tflops"]["bf16"] == pytest.approx(2 * 32 * 64 * 48 / 0.5e-3 * 1e-12)
    assert "fp8_row 0 (0.33x)" in rates.line_of(found)
    assert "gelu" not in rates.line_of(found)


def test_the_file_has_every_linear(
    rates: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(rates, "identity", lambda *_: {"torch": torch.__version__})
    monkeypatch.setattr(rates, "drawn", lambda shape, _: drawn(shape, "cpu"))
    path = tmp_path / "rates.json"
    assert rates.main(["--output", str(path), "--linears", "small"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [one["linear"] for one in rows] == ["small up", "small down"]
