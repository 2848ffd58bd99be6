"""No environment override, no config of the user's, and none remembered from another test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _alone(unconfigured: None) -> None:
    """Every test of a folder."""
