"""What the programs that time a GPU say of options that they cannot take."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

WRONG = [
    ("host_cost", "--kernels fav4", "'fav4' is not known"),
    ("host_cost", "--head-dims 0", "needs numbers above zero"),
    ("host_cost", "--groups 0", "need numbers above zero"),
    ("host_cost", "--output no/such/out.json", "no/such is not a folder"),
    ("host_cost", "", "there is no GPU that torch can use, and without one nothing is launched"),
    ("peers", "--presets cogvideo", "'cogvideo': allowed are cogvideox-2b"),
    ("peers", "--kernels fav4", "'fav4' is not known"),
    ("peers", "--budget 0", "--budget: needs a number above zero"),
    ("peers", "--rows 0", "--rows: needs a number above zero"),
    ("peers", "", "there is no GPU that torch can use"),
    ("prepass", "", "there is no GPU"),
    ("short_calls", "--budget nan", "--budget: needs a number above zero"),
    ("short_calls", "", "there is no GPU"),
    ("linear_rates", "--linears large", "'large' names none of cogvideox-2b qkv"),
    ("grouped_rates", "--models large", "'large' names none of mixtral-8x7b"),
]


@pytest.mark.parametrize(("program", "options", "sentence"), WRONG)
def test_wrong_options_end_in_one_sentence(
    program: str,
    options: str,
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main = importlib.import_module(program).main
    with pytest.raises(SystemExit) as ended:
        main(["--output", str(tmp_path / "out.json"), *options.split()])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers")
    with pytest.raises(SystemExit):
        importlib.import_module("step_times").parsed(["--output", "x", "--models", "wan-99b"])
    assert "'wan-99b' is no model; choose from cogvideox-2b" in capsys.readouterr().err


def test_names_are_known_by_their_beginnings() -> None:
    named = importlib.import_module("gpu_options").beginnings({"small up": 1, "small down": 2})
    assert named("small d") == ["small down"]
    assert named("small d,small") == ["small up", "small down"]
    with pytest.raises(argparse.ArgumentTypeError, match="names none of small up, small down"):
        named("large")
