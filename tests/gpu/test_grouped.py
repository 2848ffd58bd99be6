"""Grouped linears on a device: every backend beside the definition, graphs of other routings."""

from __future__ import annotations

import math

import pytest
import torch

import sage_plugin
from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.grouped_linear.experts import Experts, run_experts
from sage_plugin.kernels.grouped_linear.weight import quantize_weights
from tests.gpu.pairs import pairwise
from tests.kernels.grouped_linear.cases import exact, loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LOSSES = {"bf16": 0.004, "fp8_row": 0.04, "int8_row": 0.012}
SPREADS = {
    "even": [100] * 8,
    "skewed": [0, 700, 1, 3, 0, 90, 129, 64],
    "tiles": [128, 256, 64, 0, 128, 16, 512, 128],
    "one row": [0, 0, 0, 1, 0, 0, 0, 0],
    "none": [0] * 8,
}
FEATURES = {"aligned": (512, 768), "odd": (208, 72), "wide": (2880, 640)}


def drawn(spread, features, dtype, beyond=37):
    """Input with NaN behind its groups, weights, sizes and bias, on the device."""
    k, n = features
    rows = sum(spread) + beyond
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, device="cuda", generator=generator)

    x = draw(rows, k).to(dtype)
    x[sum(spread) :] = math.nan
    weights = (draw(len(spread), n, k) * k**-0.5).to(dtype)
    return x, weights, torch.tensor(spread, dtype=torch.int32, device="cuda"), draw(len(spread), n)


@pairwise(
    kernel=list(LOSSES), backend=["auto", "triton", "torch"], spread=SPREADS, features=FEATURES,
    dtype=[torch.bfloat16, torch.float16], with_bias=[False, True],
)  # fmt: skip
def test_rows_meet_the_weight_of_their_group(kernel, backend, spread, features, dtype, with_bias):
    x, weights, sizes, bias = drawn(spread, features, dtype)
    bias = bias.to(dtype) if with_bias else None
    try:
        out = sage_plugin.grouped_linear(
            x, weights, sizes, bias=bias, kernel=kernel, backend=backend
        )
    except UnsupportedInputError:
        assert backend == "torch"  # which multiplies some formats on some devices
        return
    used = sum(spread)
    cpu = [None if t is None else t.cpu() for t in (x, weights, sizes, bias)]
    assert loss(out.cpu(), exact(*cpu)) < LOSSES[kernel]
    assert not out[used:].any()


@pytest.mark.parametrize("kernel", LOSSES)
def test_a_graph_is_replayed_with_other_routings(kernel):
    x, weights, sizes, _ = drawn([100] * 8, (512, 768), torch.bfloat16)
    x = x.nan_to_num(0.0)
    given = weights if kernel == "bf16" else quantize_weights(weights, kernel)
    run = lambda: sage_plugin.grouped_linear(x, given, sizes, kernel=kernel)  # noqa: E731
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for spread in SPREADS.values():
        sizes.copy_(torch.tensor(spread))
        graph.replay()
        eager = sage_plugin.grouped_linear(x.clone(), given, sizes.clone(), kernel=kernel)
        assert torch.equal(out, eager)


def test_the_same_call_has_the_same_bits_and_graphs_of_compilers_too():
    x, weights, sizes, _ = drawn(SPREADS["skewed"], (512, 768), torch.bfloat16)
    run = lambda x: sage_plugin.grouped_linear(x, weights, sizes, kernel="fp8_row")  # noqa: E731
    first = run(x)
    for _ in range(4):  # recorded, then replayed
        assert torch.equal(run(x.clone()), first)
    assert torch.equal(torch.compile(run, fullgraph=True)(x), first)


def test_experts_run_in_a_graph_as_on_a_cpu():
    torch.manual_seed(0)
    up, down = torch.randn(8, 256, 128) * 128**-0.5, torch.randn(8, 128, 128) * 128**-0.5
    x, weights, chosen = torch.randn(64, 128), torch.rand(64, 2), torch.randint(0, 9, (64, 2))
    expected = run_experts(
        x.bfloat16(), chosen, weights,
        Experts(*(quantize_weights(w.bfloat16(), "int8_row") for w in (up, down))),
    )  # fmt: skip
    experts = Experts(*(quantize_weights(w.bfloat16().cuda(), "int8_row") for w in (up, down)))
    x, weights, chosen = x.bfloat16().cuda(), weights.cuda(), chosen.cuda()
    run_experts(x, chosen, weights, experts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_experts(x, chosen, weights, experts)
    graph.replay()
    torch.cuda.synchronize()
    assert loss(out.cpu(), expected.double()) < 0.01


def test_offsets_past_two_to_the_31_are_right():
    x = torch.randn(280_000, 64, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(4, 8192, 64, device="cuda", dtype=torch.bfloat16)
    sizes = torch.tensor([140_000, 0, 0, 140_000], dtype=torch.int32, device="cuda")
    out = sage_plugin.grouped_linear(x, weights, sizes, kernel="fp8_row", backend="triton")
    for row, group in ((0, 0), (139_999, 0), (140_000, 3), (279_999, 3)):
        expected = x[row].double() @ weights[group].double().t()
        assert loss(out[row].cpu(), expected.cpu()) < 0.05
