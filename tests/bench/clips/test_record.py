"""The JSON of a proof."""

from __future__ import annotations

import json

import pytest

from sage_plugin.bench.clips.record import json_text
from tests.bench.clips.comparisons import timed, untimed


def test_everything_is_in_the_file():
    found = json.loads(json_text(timed(), {"seed": 5}))
    assert (found["schema_version"], found["seed"], found["stamp"]) == (1, 5, "clean")
    assert found["gain_over_front_db"] == pytest.approx(1.0)
    assert found["notes"] == ["predicted for H100, and this is H200"]
    ours = found["rows"][-1]
    assert (ours["name"], ours["kernel_calls"], ours["attention_calls"]) == ("policy", 16, 16)
    assert (ours["mean_psnr_db"], ours["min_psnr_db"]) == (36.0, 35.5)
    assert (ours["mean_ssim"], ours["min_ssim"]) == (pytest.approx(0.925), 0.9)
    assert ours["quality"]["psnr_db"] == [35.5, 36.5]
    assert ours["step_error"] == pytest.approx([0.002, 0.004, 0.008, 0.016])
    assert (ours["time"]["step_ms"], ours["time"]["run_ms"]) == (5.0, 21.0)
    assert (ours["saved_ms"], ours["predicted_saved_ms"]) == (20.0, 17.0)
    assert (ours["predicted_ms"], ours["predicted_error"]) == (7.0, 0.25)


def test_infinity_is_a_word_and_missing_is_null():
    text = json_text(untimed(), {})
    host = json.loads(text)["rows"][0]
    assert host["mean_psnr_db"] == host["min_psnr_db"] == host["quality"]["psnr_db"][0] == "inf"
    assert host["time"] is host["predicted_ms"] is None
    assert "Infinity" not in text
    assert json.loads(text)["gain_over_front_db"] is None
