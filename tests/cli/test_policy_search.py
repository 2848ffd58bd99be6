"""`sage policy search` from the outside: what it prints, writes and exits with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import rich.progress

from sage_plugin.cli.policy import search as policy_search
from sage_plugin.plugin.policy.rules import read
from sage_plugin.tune.policy.request import PolicyRequest
from tests.cli import program
from tests.tune.policy import recordings

SEARCH = ("--times", "times.json", "--min-seq", "16", "--step-ranges", "2")
BUDGET = ("--max-error", "0.03")


@pytest.fixture(autouse=True)
def _recorded():
    recordings.write(Path("captured_inputs"))
    recordings.times(Path("times.json"))


def sage(*words):
    return program.sage("policy", "search", *words)


def test_the_whole_way_to_a_sound_policy():
    result = sage(*SEARCH, *BUDGET, "-o", "mine.json")
    assert result.exit_code == 0, result.stderr
    assert "Wrote mine.json. Next: sage policy prove mine.json" in result.stdout
    assert "24.00 with the host's" in result.stdout
    policy = read(Path("mine.json"))
    assert 0 < policy.prediction.of("policy").error <= 0.03
    assert program.sage("configs check mine.json").exit_code == 0
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


def test_the_options_are_fields_of_the_request_with_its_defaults():
    fields = {field.name: field.default for field in dataclasses.fields(PolicyRequest)}
    for option in dataclasses.fields(policy_search.PolicyOptions):
        assert (option.default or None) == (fields[option.name] or None), option.name


def test_progress_is_one_line(monkeypatch):
    added = []
    original = rich.progress.Progress.add_task

    def add(self, description, *args, **more):
        added.append(description)
        return original(self, description, *args, **more)

    monkeypatch.setattr(rich.progress.Progress, "add_task", add)
    assert sage(*SEARCH, *BUDGET).exit_code == 0
    assert added == [""]
