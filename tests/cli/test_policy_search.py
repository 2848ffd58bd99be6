"""`sage policy search` from the outside: what it prints, writes and exits with."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest
import rich.progress
from typer.testing import CliRunner

from sage_plugin.cli import app
from sage_plugin.cli.policy import search as policy_search
from sage_plugin.kernels.attention import dispatch
from sage_plugin.plugin.policy.rules import read
from sage_plugin.tune.policy.request import PolicyRequest
from tests.tune.policy import recordings

SEARCH = ("--times", "times.json", "--min-seq", "16", "--bands", "2")
BUDGET = ("--max-error", "0.03")


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    for name in ("CONFIG_DIR", "KERNEL", "VARIANT", "LAUNCH"):
        monkeypatch.delenv(f"SAGE_PLUGIN_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    dispatch.forget()
    recordings.write(tmp_path / "captured_inputs")
    recordings.times(tmp_path / "times.json")
    yield
    dispatch.forget()


def sage(*words):
    result = CliRunner().invoke(app, ["policy", "search", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_the_whole_way_to_a_sound_policy():
    result = sage(*SEARCH, *BUDGET, "-o", "mine.json")
    assert result.exit_code == 0, result.stderr
    assert "Wrote mine.json. Next: sage policy prove mine.json" in result.stdout
    assert "24.00 with the host's" in result.stdout
    policy = read(Path("mine.json"))
    assert 0 < policy.prediction.of("policy").error <= 0.03
    assert CliRunner().invoke(app, ["configs", "check", "mine.json"]).exit_code == 0
    assert [p.name for p in Path().iterdir() if "tmp" in p.name] == []
    again = sage(*SEARCH, *BUDGET, "-o", "mine.json")
    assert again.exit_code == 0
    assert read(Path("mine.json")) == policy


def test_a_dry_run_shows_the_front_and_writes_no_policy():
    result = sage(*SEARCH, *BUDGET, "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert "mean error" in result.stdout
    assert "Next: the same command without --dry-run" in result.stdout
    assert not Path("policy.json").exists()


def test_the_defaults_are_those_of_the_library():
    said = {
        name: p.default for name, p in inspect.signature(policy_search.command).parameters.items()
    }
    said["captures_per_cell"] = said["max_captures_per_key"]
    fields = {field.name: field.default for field in dataclasses.fields(PolicyRequest)}
    for name in ("max_layer_error", "bands", "min_seq", "captures_per_cell"):
        assert said[name] == fields[name], name


def test_each_kind_of_progress_is_one_line(monkeypatch):
    added = []
    original = rich.progress.Progress.add_task

    def add(self, description, *args, **more):
        added.append(description)
        return original(self, description, *args, **more)

    monkeypatch.setattr(rich.progress.Progress, "add_task", add)
    assert sage(*SEARCH, *BUDGET).exit_code == 0
    assert added == ["captures judged"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ((*SEARCH,), 2, "give one of --max-error and --max-ms"),
        ((*SEARCH, *BUDGET, "--max-ms", "9"), 2, "give one of"),
        ((*SEARCH, "--max-error", "nan"), 2, "--max-error"),
        ((*SEARCH, "--max-error", "1e-7"), 1, "nothing that saves time has so little error"),
        ((*SEARCH, "--max-ms", "1"), 1, "the fastest choice takes"),
        ((*SEARCH, *BUDGET, "--kernel", "flash9"), 2, "flash9"),
        ((*SEARCH, *BUDGET, "--kernel", "sage+hadamart=4"), 2, "hadamart"),
        ((*SEARCH, *BUDGET, "--effects", "absent.json"), 2, "absent.json"),
        ((*SEARCH, *BUDGET, "--space", "s.json"), 2, "No such option"),
        ((*SEARCH, *BUDGET, "-o", "times.json"), 2, "exists and is no policy"),
        ((*SEARCH, *BUDGET, "-o", "no/p.json"), 2, "does not exist"),
        ((*SEARCH, *BUDGET, "-o", "."), 2, "is no policy"),
        ((*SEARCH, *BUDGET, "--bands", "0"), 2, "--bands 0"),
        ((*SEARCH, *BUDGET, "--device", "cuda"), 3, "no GPU"),
        (BUDGET, 2, "on a CPU kernels are emulated"),
        (("absent", *BUDGET), 2, ""),
    ],
)
def test_what_cannot_be_done_is_one_sentence(words, code, says):
    before = Path("times.json").read_bytes()
    result = sage(*words)
    assert result.exit_code == code, result.stderr
    said = " ".join(result.stderr.split())
    assert says in said
    assert "Traceback" not in said
    assert not Path("policy.json").exists()
    assert Path("times.json").read_bytes() == before
