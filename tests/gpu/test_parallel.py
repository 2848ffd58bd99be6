"""On two GPUs: a spread model runs on the kernels of both, and gives the outputs of one."""

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

KERNELS = {"fav2": "", "sage": "int8_row", "fav3_sage": "fp8_row"}
"""Kernels of attention, each with that of the linears."""
CASES = [Run("wan", k, w, on) for k, on in KERNELS.items() for w in ("ulysses", "ring")]
SHARDED = [
    *(Run("llama", k, spread.TP, on) for k, on in KERNELS.items()),
    *(Run("mixtral", k, spread.TP, on) for k, on in KERNELS.items() if on),
    Run("flux", "fav3_sage", spread.SHARDS, "fp8_row"),
]
UNPATCHED = {run.model: Run(run.model, "", run.way) for run in SHARDED}
"""Sums of 16-bit parts differ from those of one GPU without us too."""

ON_LINEARS = {"llama": 14, "mixtral": 10, "flux": 17}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("diffusers")
    return spread.results(
        CASES + SHARDED + list(UNPATCHED.values()), tmp_path_factory.mktemp("spread"), gpus=True
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_gpus_give_the_output_of_one(case, found):
    network, arguments = spread.build("wan", "cuda:0", torch.bfloat16, scale=6)
    exact = spread.forward(network, arguments).float().cpu()
    with sage_plugin.patched(network, **case.options):
        alone = spread.forward(network, arguments).float().cpu()
    for out, rows, _ in found[case.name]:
        error, usual = ((x - exact).abs().mean() for x in (out.float(), alone))
        assert error < 2 * usual + 1e-3 * exact.abs().mean()
        own = [calls for layer, calls, why in rows if layer.endswith("attn1") and not why]
        assert [calls.pop(spread.FUSED) for calls in own] == [1, 1]
        assert all(sum(c.values()) == (2 if case.way == "ring" else 1) for c in own)
        assert all(label.startswith(case.kernel) for c in own for label in c)
        assert sum(len(c) for _, c, _ in rows) == 2 + 20 * bool(case.linears)


@pytest.mark.parametrize("case", SHARDED, ids=lambda case: case.name)
def test_two_gpus_multiply_their_shards(case, found):
    if case.model in spread.LANGUAGE_MODELS:
        network = spread.LANGUAGE_MODELS[case.model]().to("cuda:0", torch.bfloat16)
        arguments = spread.sentence("cuda")
    else:
        network, arguments = spread.build(case.model, "cuda:0", torch.bfloat16, scale=6)
    exact = spread.forward(network, arguments).float().cpu()
    with sage_plugin.patched(network, **case.options):
        alone = spread.forward(network, arguments).float().cpu()
    for out, rows, wrong in found[case.name]:
        assert not wrong
        (of_spreading, *_), _ = found[UNPATCHED[case.model].name]
        error, usual, spread_error = (
            (x.float() - exact).abs().mean() for x in (out, alone, of_spreading)
        )
        assert error < 2 * usual + 2 * spread_error + 1e-3 * exact.abs().mean()
        assert len(rows) == 2 + ON_LINEARS[case.model] * bool(case.linears)
        for layer, calls, why in rows:
            calls.pop(spread.FUSED, None)
            assert sum(calls.values()) == 1, layer
            assert not why
