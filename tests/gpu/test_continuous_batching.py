"""Continuous batching on a device: CUDA graphs of 8-bit caches tell what eager batches do."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import sage_plugin
from sage_plugin.plugin.hosts.eight_bit_pages import CACHE
from tests.plugin.test_continuous_batching import LONG, generated, model

__all__ = ["model"]  # a fixture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec(f"{CACHE}_allocators") is None, reason="no caches of 8 bits"
    ),
]


@pytest.mark.parametrize(
    ("cache", "kernel"), [("int8", "auto"), ("int8", "qk_int8"), ("fp8", "auto")]
)
def test_graphs_tell_what_eager_batches_do(model: nn.Module, cache: str, kernel: str) -> None:
    model.to("cuda")
    try:
        expected = generated(model, LONG, tokens=24)
        with sage_plugin.continuous_batching(model, cache=cache, kernel=kernel):
            eager = generated(model, LONG, tokens=24, use_cuda_graph=False)
            graphs = generated(model, LONG, tokens=24, use_cuda_graph=True)
        emulated = f"{'fav2' if kernel == 'auto' else kernel}:emulation"
        with sage_plugin.continuous_batching(model, cache=cache, kernel=emulated):
            slow = generated(model, LONG, tokens=24, use_cuda_graph=False)
    finally:
        model.to("cpu")
    assert graphs == eager
    # texts of 8 bits may take another turn; by the emulation they take the same ones
    assert sum(x == y for x, y in zip(eager, slow, strict=True)) >= len(LONG) - 1
    assert sum(x == y for x, y in zip(eager, expected, strict=True)) >= len(LONG) - 2
