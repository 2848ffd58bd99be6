"""`sage policy sensitivity` on the embedded model, on a CPU."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from sage_plugin import files
from sage_plugin.bench.clips.draw import Subject
from sage_plugin.bench.clips.sensitivity import measure_sensitivity
from sage_plugin.cli.policy import sensitivity as policy_sensitivity
from sage_plugin.errors import DeviceError
from sage_plugin.tune.policy.sensitivity_file import Sensitivities, Sensitivity, read
from tests.cli.program import sage
from tests.short import keep_short

pytest.importorskip("diffusers")

LAYERS = 4
EARLIER = Sensitivities(1, "sage", (Sensitivity("x.0", "", 0.1), Sensitivity("x.1", "", 0.0)))


def sensitivity(*words):
    return sage("policy", "sensitivity", *words)


@pytest.fixture
def brief(monkeypatch):
    keep_short(monkeypatch)


def test_it_is_measured_per_layer_and_range_and_written(brief):
    words = ("--kernel", "sage", "--step-ranges", 2, "--num-inference-steps", 2)
    files.write_json(Path("e.json"), EARLIER.to_json())  # a file of its own is replaced
    result = sensitivity("--output", "e.json", *words)
    assert result.exit_code == 0, result.output
    found = read(Path("e.json"))
    assert found.kernel == "sage"
    assert len({one.layer for one in found.cells}) == LAYERS
    assert [one.steps for one in found.cells] == [":50%", "50%:"] * LAYERS
    # A step that is quantised moves the clip, and by less than a grey level of 255.
    assert all(0 < one.rmse < 1 / 255 for one in found.cells)
    level = -20 * math.log10(found.cells[0].rmse)
    assert f"{level:.1f}" in result.stdout


def test_both_op_families_are_measured_into_one_file(brief):
    words = ("--kernel", "fp8_row", "--kernel", "sage", "--num-inference-steps", 1)
    chosen = ("--layers", "*.0.ff.net.2", "--layers", "*.3.attn1")
    result = sensitivity("--output", "e.json", *words, *chosen)
    assert result.exit_code == 0, result.output
    found = read(Path("e.json"))
    block = "transformer.transformer_blocks"
    assert [(one.layer, one.kernel, one.steps) for one in found.cells] == [
        (f"{block}.0.ff.net.2", "fp8_row", ""),
        (f"{block}.3.attn1", "sage", ""),
    ]
    assert all(one.rmse > 0 for one in found.cells)
    for kernels in (("fp8_row", "int8_row"), ("fav3_fp8+hadamard=64",)):
        refused = sensitivity(*(word for one in kernels for word in ("--kernel", one)))
        assert "one kernel of each op" in " ".join(refused.output.split())


class Toy:
    """A pipeline whose clip tells what part of it ran on a kernel."""

    def __init__(self, levels):
        self.levels, self.rules = iter(levels), []

    def draw(self, on_step):
        for _ in range(3):
            on_step(torch.zeros(1))
        return np.full((1, 2, 2, 1), next(self.levels), dtype=np.float32)


def subject(toy, monkeypatch, layers=("a.0", "a.1")):
    import contextlib
    import types

    @contextlib.contextmanager
    def patched(self, config):
        toy.rules += () if config.policy is None else config.policy.rules
        yield types.SimpleNamespace(layers=dict.fromkeys(layers))

    monkeypatch.setattr(Subject, "patched", patched)
    return Subject(None, toy.draw, torch.device("cpu"))


def test_a_sensitivity_is_the_root_mean_square_of_the_difference(monkeypatch):
    toy = Toy([0.5, 0.5, 0.6, 0.3, 0.5])
    found = measure_sensitivity(subject(toy, monkeypatch), ["sage"], step_ranges=2)
    assert [(layer, steps) for layer, steps, *_ in found] == [
        ("a.0", ":50%"), ("a.0", "50%:"), ("a.1", ":50%"), ("a.1", "50%:"),
    ]  # fmt: skip
    assert [round(rmse, 6) for _, _, rmse, _ in found] == [0.0, 0.1, 0.2, 0.0]
    # Each clip has that part alone on the kernel.
    assert [(rule.kernel, rule.layers, rule.steps) for rule in toy.rules] == [
        ("sage", (layer,), steps) for layer, steps, *_ in found
    ]


@pytest.mark.parametrize(
    ("levels", "sentence"), [([0.5] * 3, "no clip differs"), ([0.5, math.nan], "NaN")]
)
def test_clips_that_tell_nothing_are_refused(monkeypatch, levels, sentence):
    with pytest.raises(DeviceError, match=sentence):
        measure_sensitivity(subject(Toy(levels), monkeypatch), ["sage"], step_ranges=1)


def test_the_table_has_a_row_a_layer(capsys):
    policy_sensitivity._show(EARLIER)
    shown = capsys.readouterr().out
    assert "20.0" in shown
    assert "inf" in shown
