"""The environment asks for nothing, and every test's graphs are its own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch):
    for name in ("KERNEL", "VARIANT", "CONFIG_DIR", "LAUNCH", "DISABLE"):
        monkeypatch.delenv(f"SAGE_PLUGIN_{name}", raising=False)
