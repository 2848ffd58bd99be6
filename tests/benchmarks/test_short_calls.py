"""`benchmarks/short_calls.py`: what a size's ratios are taken from."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sage_plugin.measure.inputs import self_attention
from sage_plugin.measure.timing import Samples

SHAPE = self_attention(1, 2, 64, 32)


@pytest.fixture
def short_calls(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("short_calls")
    times = {"sdpa": 0.04, "sdpa flash": 0.02, "sage:emulation": 0.01, "fav2:emulation": 0.08}

    def measure(calls, *, method: str, **_: object) -> dict[str, Samples]:
        factor = 1.0 if method == "events" else 0.5
        for call in calls.values():
            assert isinstance(call(), torch.Tensor)
        return {
            name: Samples(name=name, ms=(factor * times[name],) * 3, method=method)
            for name in calls
        }

    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module, "BACKENDS", {"sdpa flash": module.SDPBackend.FLASH_ATTENTION})
    return module


def _args(**changes: object) -> argparse.Namespace:
    known = {"device": "cpu", "kernels": ["sage:emulation", "fav2:emulation"], "budget": 0.1,
             "prologue": False}  # fmt: skip
    return argparse.Namespace(**(known | changes))


def test_ratios_are_over_the_fastest_backend(short_calls: ModuleType) -> None:
    cell = short_calls.cell(SHAPE, _args())
    assert cell["ratio"]["eager"] == pytest.approx({"sage:emulation": 2.0, "fav2:emulation": 0.25})
    assert cell["us"]["graph"]["sdpa flash"] == pytest.approx(10.0)
    assert cell["auto"] == "sdpa:host"
    assert cell["ran"] == {name: name for name in ("sage:emulation", "fav2:emulation")}


def test_both_sides_rotate_the_same_values(short_calls: ModuleType) -> None:
    calls = short_calls.calls_of(SHAPE, _args(prologue=True, kernels=["fav2:emulation"]))
    exact, ours = calls["sdpa"]().float(), calls["fav2:emulation"]().float()
    without = short_calls.calls_of(SHAPE, _args(kernels=[]))["sdpa"]().float()
    assert (ours - exact).abs().max() < 0.02 * exact.abs().max()
    assert (without - exact).abs().max() > 0.1 * exact.abs().max()


def test_a_backend_that_refuses_is_left_out(
    short_calls: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudnn = {"sdpa cudnn": short_calls.SDPBackend.CUDNN_ATTENTION}
    monkeypatch.setattr(short_calls, "BACKENDS", cudnn)
    cell = short_calls.cell(SHAPE, _args())
    assert "sdpa cudnn" not in cell["us"]["eager"]
    assert cell["ratio"]["eager"]["sage:emulation"] == pytest.approx(4.0)


def test_the_file_has_a_cell_a_size(
    short_calls: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(short_calls, "cell", lambda shape, _: {
        "shape": shape.to_json(), "us": {}, "ratio": {}, "auto": "sdpa:host", "ran": {},
    })  # fmt: skip
    monkeypatch.setattr(short_calls, "identity", lambda *_: {"torch": torch.__version__})
    path = tmp_path / "short.json"
    options = ["--head-dims", "64", "--heads", "2,4", "--lengths", "256,512", "--causal"]
    assert short_calls.main(["--output", str(path), *options]) == 0
    cells = json.loads(path.read_text())["cells"]
    assert [(c["shape"]["heads_q"], c["shape"]["seq_q"]) for c in cells] == [
        (2, 256), (2, 512), (4, 256), (4, 512)
    ]  # fmt: skip
    assert all(cell["shape"]["causal"] for cell in cells)
