"""`sage policy sensitivity` on the embedded model, on a CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from sage_plugin.bench.clips.effects import measure_effects
from sage_plugin.bench.clips.run import Subject
from sage_plugin.cli import app
from sage_plugin.cli.policy import sensitivity as policy_sensitivity
from sage_plugin.errors import DeviceError
from sage_plugin.tune.policy import effects_file

pytest.importorskip("diffusers")

LAYERS = 4


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def sensitivity(*words):
    return CliRunner().invoke(app, ["policy", "sensitivity", *map(str, words)])


@pytest.fixture
def brief(monkeypatch):
    from dataclasses import replace

    from sage_plugin.demo.sizes import SIZES

    monkeypatch.setitem(SIZES, "small", replace(SIZES["small"], frames=8))


def test_effects_are_measured_a_layer_and_a_band_and_written(brief):
    words = ("--kernel", "sage", "--bands", 2, "--num-inference-steps", 2)
    result = sensitivity("--output", "e.json", *words)
    assert result.exit_code == 0, result.output
    found = effects_file.read(Path("e.json"))
    assert found.kernel == "sage"
    assert len({one.layer for one in found.effects}) == LAYERS
    assert [one.steps for one in found.effects] == [":50%", "50%:"] * LAYERS
    # A step that is quantised moves the clip, and by less than a grey level of 255.
    assert all(0 < one.rmse < 1 / 255 for one in found.effects)
    level = -20 * math.log10(found.effects[0].rmse)
    assert f"{level:.1f}" in result.stdout
    assert sensitivity("-o", "e.json", *words).exit_code == 0  # its own file is replaced


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "got none"),
        (
            ("--kernel", "sage", "--kernel", "fav2"),
            "got sage, fav2, and effects are measured with one",
        ),
        (("--kernel", "sage", "--bands", 0), "1 to 100 bands"),
        (("--output", "mine.json", "--kernel", "sage"), "is no file of effects"),
    ],
)
def test_usage_mistakes_are_one_sentence(words, sentence, tmp_path, brief):
    (tmp_path / "mine.json").write_text("[1]")
    result = sensitivity(*words)
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert json.loads((tmp_path / "mine.json").read_text()) == [1]


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
    def patched(self, way):
        toy.rules += () if way.policy is None else way.policy.rules
        yield types.SimpleNamespace(layers=dict.fromkeys(layers))

    monkeypatch.setattr(Subject, "patched", patched)
    return Subject(None, toy.draw, torch.device("cpu"))


def test_an_effect_is_the_root_mean_square_of_the_difference(monkeypatch):
    toy = Toy([0.5, 0.5, 0.6, 0.3, 0.5])
    found = measure_effects(subject(toy, monkeypatch), "sage", bands=2)
    assert [(layer, steps) for layer, steps, _ in found] == [
        ("a.0", ":50%"), ("a.0", "50%:"), ("a.1", ":50%"), ("a.1", "50%:"),
    ]  # fmt: skip
    assert [round(rmse, 6) for _, _, rmse in found] == [0.0, 0.1, 0.2, 0.0]
    # Each clip has that part alone on the kernel.
    assert [(rule.kernel, rule.layers, rule.steps) for rule in toy.rules] == [
        ("sage", (layer,), steps) for layer, steps, _ in found
    ]


@pytest.mark.parametrize(
    ("levels", "sentence"), [([0.5] * 3, "no clip differs"), ([0.5, math.nan], "NaN")]
)
def test_clips_that_tell_nothing_are_refused(monkeypatch, levels, sentence):
    with pytest.raises(DeviceError, match=sentence):
        measure_effects(subject(Toy(levels), monkeypatch), "sage", bands=1)


def test_the_table_has_a_row_a_layer(capsys):
    one = effects_file.Effect("x.0", "", 0.1)
    equal = effects_file.Effect("x.1", "", 0.0)
    policy_sensitivity._show(effects_file.Effects(1, "sage", (one, equal)))
    shown = capsys.readouterr().out
    assert "20.0" in shown
    assert "inf" in shown
