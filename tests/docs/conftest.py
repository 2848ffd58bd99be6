"""Pages and examples leave the settings and counts of the process as they found them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sage_plugin.plugin.counts import LayerCounts
from sage_plugin.plugin.hosts.registration import register


@pytest.fixture(autouse=True)
def _names_as_new() -> Iterator[None]:
    """Nothing has run under the registered name."""
    for layer in register().layers.values():
        layer.counts = LayerCounts()
    yield
    register()
