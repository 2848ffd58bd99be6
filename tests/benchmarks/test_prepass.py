"""`benchmarks/prepass.py`: what its floor counts, and what it times."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

import sage_plugin
from sage_plugin.kernels.attention.prepare import Prepared
from sage_plugin.measure.inputs import self_attention
from sage_plugin.measure.timing import Samples

SHAPE = self_attention(2, 4, 64, 32)


@pytest.fixture
def prepass(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("prepass")

    def measure(calls, *, method: str = "events", **_: object) -> dict[str, Samples]:
        for name, call in calls.items():
            made = call()
            if isinstance(made, Prepared):
                out = sage_plugin.launch(made)
                shape = (2, 4, 64, 32) if name.endswith("bhsd") else (2, 64, 4, 32)
                assert out.shape == shape
                assert out.is_contiguous()
            else:
                assert name == "copy"
        return {
            name: Samples(name=name, ms=(0.001 * (at + 1),) * 3, method=method)
            for at, name in enumerate(calls)
        }

    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module, "COPIED_BYTES", 1000)
    return module


def test_a_copy_reads_and_writes_its_bytes(prepass: ModuleType) -> None:
    assert prepass.copy_rate("cpu", 0.1) == pytest.approx(2000 / 1e-6)


def test_the_floor_counts_thirteen_bytes_a_value(prepass: ModuleType) -> None:
    values = 2 * 4 * 64 * 32
    assert prepass.floor_us(SHAPE, 1e6) == pytest.approx(13 * values)
    fewer = dataclasses.replace(SHAPE, heads_k=1, seq_k=128)
    assert prepass.floor_us(fewer, 1e6) == pytest.approx(3 * values + 10 * values / 2)


def test_every_kernel_is_timed_in_both_layouts(prepass: ModuleType) -> None:
    args = argparse.Namespace(
        device="cpu", kernels=["fav3_sage:emulation", "sage:emulation"], budget=0.1, method="wall"
    )
    found = prepass.rows("small", SHAPE, 1e9, args)
    assert [(row["kernel"], row["layout"]) for row in found] == [
        ("fav3_sage:emulation", "bhsd"), ("sage:emulation", "bhsd"),
        ("fav3_sage:emulation", "bshd"), ("sage:emulation", "bshd"),
    ]  # fmt: skip
    assert [row["us"] for row in found] == pytest.approx([1, 2, 3, 4])
    floor = 13 * 2 * 4 * 64 * 32 / 1e3
    assert found[1]["ratio"] == pytest.approx(2 / floor)
    assert "small" in prepass.line_of(found[0])
    assert "bhsd     1.0 us" in prepass.line_of(found[0])


def test_the_file_has_the_rows_of_each_preset(
    prepass: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(prepass, "copy_rate", lambda *_: 4e12)
    monkeypatch.setattr(prepass, "identity", lambda *_: {"torch": torch.__version__})
    monkeypatch.setattr(prepass, "rows", lambda name, shape, rate, _: [
        {"preset": name, "kernel": "sage", "layout": "bhsd", "us": 1.0,
         "floor_us": prepass.floor_us(shape, rate), "ratio": 2.0}
    ])  # fmt: skip
    path = tmp_path / "prepass.json"
    options = ["--presets", "hunyuan-540p,wan-480p"]
    assert prepass.main(["--output", str(path), *options]) == 0
    made = json.loads(path.read_text())
    assert made["copy_bytes_per_s"] == 4e12
    assert [row["preset"] for row in made["rows"]] == ["hunyuan-540p", "wan-480p"]
    assert made["rows"][0]["floor_us"] == pytest.approx(13 * 24 * 16452 * 128 / 4e6)
