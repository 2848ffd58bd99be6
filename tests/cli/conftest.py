"""Every command runs in an empty folder, on a CPU, without the user's settings."""

from __future__ import annotations

import logging

import pytest

from sage_plugin.tune.configs import subprocess_runner
from tests.tune.scripted import ScriptedRunner


@pytest.fixture(autouse=True)
def _alone(unconfigured, monkeypatch, tmp_path, request):
    monkeypatch.delenv("SAGE_PLUGIN_DISABLE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("COLUMNS", "160")
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def script(monkeypatch):
    """Let a scripted runner stand in for the child process."""

    def use(runner: ScriptedRunner) -> ScriptedRunner:
        monkeypatch.setattr(subprocess_runner, "SubprocessRunner", lambda **_: runner)
        return runner

    return use
