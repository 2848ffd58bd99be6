"""The ledger keeps every finished trial, whatever happens to its last line."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_plugin.errors import OutputError
from sage_plugin.schema import LaunchConfig, Trial
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run.ledger import Ledger
from tests.registry import samples

finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def trials(draw):
    return Trial(
        study=draw(st.sampled_from(["a", "b"])),
        config=samples.config(block_m=draw(st.integers(1, 5)), block_n=draw(st.integers(1, 5))),
        stage=draw(st.sampled_from(["screen", "final"])),
        status=draw(st.sampled_from(["ok", "crashed", "gate_failed"])),
        reason=draw(st.text(max_size=40)),
        time=draw(st.none() | st.builds(samples.timing, st.floats(1e-6, 1e6))),
        errors=draw(st.none() | st.just(samples.ERRORS)),
        extra=draw(st.dictionaries(st.text(max_size=8), finite, max_size=3)),
    )


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    def make():
        return tmp_path_factory.mktemp("ledger") / "ledger.jsonl"

    return make


@settings(max_examples=40)
@given(st.lists(trials(), max_size=8))
def test_what_was_appended_is_read_back(fresh, listed):
    path = fresh()
    ledger = Ledger(path)
    for trial in listed:
        assert ledger.append(trial) == trial
    again = Ledger(path)
    assert again.all() == ledger.all()
    assert again.damaged_lines == 0
    last = {(t.study, t.stage, t.config): t for t in listed}
    assert {(t.study, t.stage, t.config): t for t in again.all()} == last


@settings(max_examples=60)
@given(st.lists(trials(), min_size=1, max_size=4), st.data(), trials())
def test_a_line_torn_at_any_byte_costs_that_trial_alone(fresh, listed, data, later):
    path = fresh()
    ledger = Ledger(path)
    ends = []
    for trial in listed:
        ledger.append(trial)
        ends.append(path.stat().st_size)
    cut = data.draw(st.integers(0, ends[-1]))
    path.write_bytes(path.read_bytes()[:cut])
    # A line without its newline is whole all the same.
    whole = [trial for trial, end in zip(listed, ends, strict=True) if end - 1 <= cut]
    torn = Ledger(path)
    key = lambda t: (t.study, t.stage, t.config)  # noqa: E731
    assert {key(t): t for t in torn.all()} == {key(t): t for t in whole}
    torn.append(later)
    assert {key(t): t for t in Ledger(path).all()} == {key(t): t for t in [*whole, later]}


@settings(max_examples=100)
@given(st.binary(max_size=300))
def test_random_bytes_are_no_trials_and_no_obstacle(fresh, content):
    path = fresh()
    path.write_bytes(content)
    ledger = Ledger(path)
    assert ledger.all() == []
    trial = Trial("a", samples.CONFIG, "screen", "ok")
    ledger.append(trial)
    assert Ledger(path).all() == [trial]


@pytest.mark.parametrize(
    "line", [b"[" * 60_000, b'{"study": NaN}', b"{}", b'{"a":1}' * 20_000, b"\xff\xff", b"null"]
)
def test_damaged_lines_are_counted_and_said(fresh, line, caplog):
    path = fresh()
    good = Trial("a", samples.CONFIG, "screen", "ok")
    Ledger(path).append(good)
    path.write_bytes(line + b"\n" + path.read_bytes())
    with caplog.at_level(logging.WARNING):
        ledger = Ledger(path)
    assert ledger.all() == [good]
    assert ledger.damaged_lines == len(caplog.records) == 1
    assert "line 1" in caplog.text


@pytest.mark.parametrize("finished_at", [1e18, -1e18, 1e300, -1.0])
def test_a_trial_that_ended_at_no_time_runs_again(fresh, finished_at, caplog):
    path = fresh()
    trial = Trial("a", samples.CONFIG, "screen", "ok", extra={"finished_at": finished_at})
    path.write_text(json.dumps(trial.to_json()) + "\n")
    assert Ledger(path).all() == []
    assert "it ended at no time of a calendar" in caplog.text


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_ledger_that_is_no_file_is_an_output_error(tmp_path, kind):
    path = tmp_path / "ledger.jsonl"
    {"pipe": os.mkfifo, "device": lambda p: p.symlink_to("/dev/zero"), "folder": Path.mkdir}[kind](
        path
    )
    with pytest.raises(OutputError, match="not a regular file"):
        Ledger(path)


def test_ledgers_set_aside_in_one_second_are_all_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder.time, "strftime", lambda *_: "20260101T000000")
    for text in ("first", "second", "third"):
        (tmp_path / "ledger.jsonl").write_text(text)
        run_folder.set_aside(tmp_path)
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["first", "second", "third"]


def test_numbers_that_json_cannot_hold_are_left_out(fresh):
    errors = dataclasses.replace(samples.ERRORS, rmse=float("nan"))
    trial = Trial("a", samples.CONFIG, "screen", "ok", errors=errors)
    path = fresh()
    kept = Ledger(path).append(trial)
    assert (kept.status, kept.errors) == ("run_error", None)
    assert "not all finite" in kept.reason
    assert Ledger(path).all() == [kept]


def test_a_config_cannot_change_after_it_was_recorded():
    config = samples.config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_m = 1  # type: ignore[misc]
    assert hash(config) == hash(LaunchConfig.from_json(config.to_json()))


def test_a_ledger_that_cannot_be_written_is_an_output_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"ledger\.jsonl"):
        Ledger(tmp_path / "file" / "ledger.jsonl").append(
            Trial("a", samples.CONFIG, "screen", "ok")
        )
