"""What the lowest torch that is supported cannot do on a CPU is skipped, by what torch says."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

LOWEST = "2.11."
LEFT_TO_NEWER_TORCH = (
    "_scaled_mm only supports per-tensor scaling for CPU",
    "torch has no product of fp8_row on",
    "Only bf16 high precision output types are supported",
    "can't reconstruct arbitrary frozen dataclass instances",
)
"""FP8 products of rows on a CPU; a launch config as an argument of a compiled function."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skip a test that the lowest torch refuses; any other error, or with a newer one, is one."""
    try:
        return (yield)
    except Exception as error:
        if not torch.__version__.startswith(LOWEST):
            raise
        said = next((words for words in LEFT_TO_NEWER_TORCH if words in str(error)), None)
        if said is None:
            raise
        pytest.skip(f"this torch: {said}")
