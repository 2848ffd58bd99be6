"""Norm and rotary embedding are fused on the CPU here, by the emulation of the kernel."""

from __future__ import annotations

import pytest

from sage_plugin.plugin.prologue import eligible


@pytest.fixture
def everywhere(monkeypatch):
    """The kernel runs on all devices."""
    monkeypatch.setattr(eligible, "runs_on", lambda place: True)
