"""Grouped linears in compiled graphs: one graph, the numbers of eager mode, other sizes later."""

from __future__ import annotations

import pytest
import torch

import sage_plugin
from sage_plugin.kernels.grouped_linear.experts import Experts, run_experts
from sage_plugin.kernels.grouped_linear.weight import quantize_weights
from tests.kernels.grouped_linear.cases import CASES, drawn


@pytest.mark.parametrize("quantized", [False, True], ids=["original", "quantized"])
def test_one_graph_serves_every_spread_of_rows(quantized: bool) -> None:
    x, weights, sizes, bias = drawn(CASES["rows beyond"])
    given = quantize_weights(weights, "int8_row") if quantized else weights

    def computed(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        out = sage_plugin.grouped_linear(x * 2, given, sizes, bias=bias, kernel="int8_row")
        return out.float() + 1.0

    compiled = torch.compile(computed, backend="aot_eager", fullgraph=True)
    for changed in (sizes, sizes.flip(0), torch.zeros_like(sizes)):
        torch.testing.assert_close(compiled(x, changed), computed(x, changed))


def test_experts_are_one_graph() -> None:
    torch.manual_seed(0)
    up, down = torch.randn(4, 64, 32), torch.randn(4, 32, 32)
    experts = Experts(quantize_weights(up, "int8_row"), quantize_weights(down, "int8_row"))
    x, weights = torch.randn(6, 32), torch.rand(6, 2)
    chosen = torch.randint(0, 5, (6, 2))
    compiled = torch.compile(run_experts, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(x, chosen, weights, experts), run_experts(x, chosen, weights, experts)
    )


def test_the_ops_have_the_shapes_of_their_fakes() -> None:
    x, weights, sizes, bias = drawn(CASES["spread"])
    ops = torch.ops.sage_plugin
    torch.library.opcheck(
        ops.grouped_linear.default, (x, weights, sizes, bias, "int8_row", "auto", None)
    )
    made = quantize_weights(weights, "int8_row")
    rows = torch.randint(-127, 128, x.shape, dtype=torch.int8), torch.rand(x.shape[0], 1)
    torch.library.opcheck(
        ops.grouped_product.default,
        (*rows, made.data, made.scale, sizes, bias, "int8_row", torch.float16, None),
    )
