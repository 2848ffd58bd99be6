"""On two GPUs: a spread sequence runs on the kernels of both, and gives the outputs of one."""

from __future__ import annotations

import pytest
import torch

import sage_plugin
from tests.plugin import spread
from tests.plugin.spread import Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

KERNELS = ("fav2", "sage", "fav3_sage")
CASES = [Run("wan", k, w) for k in KERNELS for w in ("ulysses", "ring")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("diffusers")
    return spread.results(CASES, tmp_path_factory.mktemp("spread"), gpus=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_gpus_give_the_output_of_one(case, found):
    network, arguments = spread.build("wan", "cuda:0", torch.bfloat16, scale=6)
    exact = spread.forward(network, arguments).float().cpu()
    with sage_plugin.patched(network, kernel=case.kernel, min_seq=32):
        alone = spread.forward(network, arguments).float().cpu()
    for out, rows, _ in found[case.name]:
        error, usual = ((x - exact).abs().mean() for x in (out.float(), alone))
        assert error < 2 * usual + 1e-3 * exact.abs().mean()
        own = [calls for layer, calls, why in rows if "attn1" in layer and not why]
        assert len(own) == 2
        assert all(sum(c.values()) == (2 if case.way == "ring" else 1) for c in own)
        assert all(label.startswith(case.kernel) for c in own for label in c)
