"""On a device: the Hopper variants are the Gluon kernels, not what stands behind them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sage_plugin.kernels.attention.recipes import implementation
from tests.kernels.calls import HOPPER


@pytest.fixture(autouse=True)
def _gluon_builds() -> Iterator[None]:
    """A variant that fell back to the portable one would pass every test of accuracy."""
    yield
    if torch.cuda.is_available():
        for kernel in HOPPER:
            assert implementation(kernel, "hopper", torch.float8_e4m3fn).reason is None
