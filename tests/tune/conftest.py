"""No environment override, a user folder of its own, and no config remembered from another test."""

from __future__ import annotations

from pathlib import Path

import pytest

from sage_plugin.kernels.attention import dispatch


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("CONFIG_DIR", "KERNEL", "VARIANT", "LAUNCH"):
        monkeypatch.delenv(f"SAGE_PLUGIN_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    dispatch.forget()
    yield
    dispatch.forget()
