"""Shared by all tests: without a GPU, Triton kernels run in its interpreter with correct casts."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def interpreted() -> None:
    """Run portable kernels in Triton's interpreter, with casts as a GPU does them."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU here; tests/gpu covers them")
    from tests.interpreter import correct_casts

    correct_casts()
