"""The environment asks for nothing, and every test's graphs are its own."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch):
    for name in ("KERNEL", "VARIANT", "CONFIG_DIR", "LAUNCH", "DISABLE"):
        monkeypatch.delenv(f"SAGE_PLUGIN_{name}", raising=False)


@pytest.fixture
def one_thread():
    """Threads that wait for a core which others use take far longer than these tiny models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
