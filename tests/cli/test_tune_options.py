"""Options of `sage tune` that change what may win and where it runs, from the outside."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sage_plugin.cli.tuning.progress import LINE_EVERY_S, ProgressView
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run.ledger import Ledger
from tests.cli import program
from tests.registry import samples
from tests.tune import captures, scripted
from tests.tune.captures import GROUPED, SELF
from tests.tune.scripted import ScriptedRunner

ROOT = Path(__file__).resolve().parents[2]
CALL = ("-sq", "64", "-hq", "1", "-d", "32", "--config-dir", "c")
SMALL = (*CALL, "--device", "cpu")
OF_CARD = (*CALL, "--kernel", "sage:portable", "--space", "two.json")


def sage(*words: object):
    return program.sage("tune", *words)


def small_tiles_are_fast_and_inexact() -> ScriptedRunner:
    """Of two tiles, that of 64 keys takes half the time with half more error."""
    Path("two.json").write_text('{"block_n": [64, 128]}')

    def errors(config):
        error = samples.ERRORS.centred_rel_l1 * (1.5 if config.block_n == 64 else 1.0)
        return dataclasses.replace(samples.ERRORS, centred_rel_l1=error)

    return ScriptedRunner(lambda c: 0.5 if c.block_n == 64 else 1.0, noise=0.001, errors=errors)


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ([], "confirmed"),
        (["--max-error-ratio", "1.6"], "tuned"),
        (["--max-error-ratio", "1.6", "--max-error", "1e-9"], "failed"),
    ],
)
def test_the_error_of_a_winner_is_limited_and_the_front_is_shown(on_gpu, script, words, verdict):
    script(small_tiles_are_fast_and_inexact())
    result = sage(*OF_CARD, *words, "--run-name", "r")
    assert result.exit_code == (1 if verdict == "failed" else 0), result.stderr
    results = json.loads(Path("tuning_runs/r/results.json").read_text())["results"]
    assert [one["verdict"] for one in results] == [verdict]
    assert [point["ratio"] < 0.6 for point in results[0]["front"]] == [True, False]
    metadata = json.loads(Path("tuning_runs/r/run_metadata.json").read_text())
    assert metadata["options"]["max_ratio"] == (1.6 if words else 1.1)
    if verdict != "failed":
        assert "time and error" in result.stdout
        assert ("too inexact to win" in result.stdout) == (verdict == "confirmed")
        assert (Path("tuning_runs/r") / run_folder.FRONT).stat().st_size > 1000
    else:
        exact = samples.ERRORS.centred_rel_l1
        assert f"2 beyond --max-error (the most exact has {exact:.4g})" in result.stderr


def test_an_emulation_shows_no_times_and_sells_no_exactness(script):
    script(small_tiles_are_fast_and_inexact())
    result = sage(*SMALL, "--run-name", "r", "--max-error-ratio", "1.6")
    assert result.exit_code == 0, result.stderr
    assert "tuned" in result.stdout
    listed = program.sage("configs", "list", "--device", "cpu", "--config-dir", "c").stdout
    for shown in (result.stdout, result.stderr, listed):
        assert re.search(r"\d ms\b|\d %", shown) is None, shown
    assert "time and error" not in result.stdout
    assert not (Path("tuning_runs/r") / run_folder.FRONT).exists()


def test_a_shard_tunes_its_part_into_a_folder_of_its_own(script, tmp_path):
    captures.write(tmp_path / "captured_inputs", [(SELF, (0, 1)), (GROUPED, (0, 1))])
    for part in (1, 2):
        script(ScriptedRunner())
        result = sage("--from-captures", "--config-dir", "c", "--shard", f"{part}/2")
        assert result.exit_code == 0, result.stderr
    folders = sorted(Path("tuning_runs").iterdir())
    assert [folder.name.partition(".")[2] for folder in folders] == [
        "shard-1-of-2",
        "shard-2-of-2",
    ]
    found = [json.loads((f / "results.json").read_text())["results"] for f in folders]
    assert [len(results) for results in found] == [1, 1]
    assert found[0][0]["key"] != found[1][0]["key"]


def test_what_is_about_to_happen_is_said_before_it_does(script):
    script(ScriptedRunner())
    result = sage(*SMALL)
    assert "Tune: about" in result.stderr
    assert "3 configs of 1 call. Ctrl-C keeps what is known." in result.stderr


@pytest.mark.parametrize("device", [[], ["--device", "cpu"]])
def test_ctrl_c_shows_the_best_so_far_and_the_command_that_goes_on(script, device, request):
    def press(count: int) -> None:
        if count == 9:
            raise KeyboardInterrupt

    if not device:
        request.getfixturevalue("on_gpu")
    Path("space.json").write_text('{"block_n": [64, 128, 256], "num_warps": [1, 2, 4, 8]}')
    script(ScriptedRunner(before=press))
    kernel = ("--kernel", "sage:emulation" if device else "sage:portable")
    result = sage(*CALL, *device, *kernel, "--space", "space.json")
    assert result.exit_code == 130
    best = "best of 9 so far takes 1.000 of the default: the default"
    assert ("9 of 9 so far are valid" if device else best) in result.stdout
    assert "Stopped with 1 of 1 calls to go. Next: sage" in result.stdout


class Log:
    """A console that is no terminal."""

    is_terminal = False

    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, text: str, **_: object) -> None:
        self.lines.append(text)


def test_a_log_gets_lines_now_and_then(monkeypatch):
    study, now = scripted.study(8), [0.0]
    monkeypatch.setattr("sage_plugin.cli.tuning.progress.time.monotonic", lambda: now[0])
    runner, log = ScriptedRunner(), Log()
    with ProgressView(log) as view:
        view.study_started(study, done=2, total=8)
        for config in study.space[2:]:
            now[0] += LINE_EVERY_S / 2
            view.trial_finished(study, runner.judge(study, config))
        view.race_started(study, 3)
        view.study_finished(study, "tuned")
    name = "fav3_sage 1x16 heads of 64, 1,024 tokens, bf16 bhsd: "
    assert [line.removeprefix(name) for line in log.lines] == [
        "8 configs, 2 from an earlier run",
        "4/8 tried",
        "6/8 tried",
        "8/8 tried",
        "8/8 tried, racing 3 finalists",
        "8/8 tried, tuned",
    ]


def test_each_candidate_is_a_line_where_somebody_wants_to_see_it(script, caplog):
    script(ScriptedRunner(noise=0.001))
    caplog.set_level("INFO")
    assert program.sage("-v", "tune", *SMALL).exit_code == 0
    lines = [text for text in caplog.messages if text.startswith("screen ok")]
    assert len(lines) == 3
    assert all('"block_m":128' in line and "ratio" in line for line in lines)


def hear_ctrl_c() -> None:
    """A shell's background job ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_real_signal_ends_the_children_and_names_the_command_that_goes_on(sent):
    Path("space.json").write_text('{"block_m": [16, 32, 64, 128], "num_warps": [1, 2, 4, 8]}')
    words = [*SMALL, "--space", "space.json", "--run-name", "r"]
    process = subprocess.Popen(
        [sys.executable, "-m", "sage_plugin", "tune", *words], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, preexec_fn=hear_ctrl_c,
    )  # fmt: skip
    ledger = Path("tuning_runs/r") / run_folder.LEDGER
    end = time.monotonic() + 60
    while time.monotonic() < end and (not ledger.exists() or len(Ledger(ledger).all()) < 2):
        time.sleep(0.05)
    process.send_signal(sent)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Next: sage tune -sq 64" in out
    assert "so far are valid" in out
    assert 2 <= len(Ledger(ledger).all()) < 16
    assert not (Path("tuning_runs/r") / run_folder.CRASH_MARKER).exists()
