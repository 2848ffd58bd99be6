"""`sage policy smoothing` from the outside, and the search that takes its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from sage_plugin.capture.recording.recorder import record
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.plugin.linears.smoothing import read
from sage_plugin.plugin.policy import rules
from tests.capture.toys import LAYERS, denoise, video_model
from tests.cli import program
from tests.tune.policy import recordings

EACH = 6


@pytest.fixture(autouse=True)
def _recorded():
    model = video_model()
    with record(model, "captured_inputs", ops="linear", max_captures=24):
        denoise(model, steps=1)


def test_from_captures_to_a_policy_that_smooths():
    made = program.sage("policy smoothing")
    assert made.exit_code == 0, made.stderr
    assert f"Factors of {LAYERS * EACH} linears, which read {LAYERS * 4} tensors." in made.stdout
    assert "smoothing='smoothing.safetensors')" in made.stdout
    assert len(read("smoothing.safetensors").factors) == LAYERS * EACH
    shapes = {r.shape for r in open_captures("captured_inputs").records}
    recordings.times(Path("t.json"), {"bf16": 1.0, "int8_row+smoothing=true": 0.1}, tuple(shapes))
    Path("out").mkdir()
    searched = program.sage(
        "policy search --max-error 0.5 --times t.json --smoothing smoothing.safetensors "
        "--kernel int8_row+smoothing=true -o out/mine.json"
    )
    assert searched.exit_code == 0, searched.stderr
    assert "smoothing=true" in searched.stdout
    assert '"smoothing": "../smoothing.safetensors"' in Path("out/mine.json").read_text()
    assert read(rules.read(Path("out/mine.json")).smoothing).factors
    assert program.sage("configs check out/mine.json").exit_code == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--strength 2", "--strength 2.0: must be from 0 to 1"),
        ("elsewhere", "elsewhere"),
        ("-o notes.txt", "is not a file of schema version"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(words, sentence):
    Path("notes.txt").write_text("mine")
    result = program.sage(f"policy smoothing {words}")
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert Path("notes.txt").read_text() == "mine"
    assert not Path("smoothing.safetensors").exists()
