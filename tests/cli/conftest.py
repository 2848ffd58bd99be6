"""Every command runs in an empty folder, on a CPU, without the user's settings."""

from __future__ import annotations

import logging

import pytest

from sage_plugin.kernels.attention import dispatch


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path, request):
    for name in ("CONFIG_DIR", "KERNEL", "VARIANT", "LAUNCH", "DISABLE"):
        monkeypatch.delenv(f"SAGE_PLUGIN_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("COLUMNS", "160")
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    dispatch.forget()
    yield
    dispatch.forget()
    root.handlers[:], root.level = handlers, level
