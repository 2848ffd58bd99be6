"""Quantized linears in compiled graphs and under torch's modes."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx

import sage_plugin
from sage_plugin.kernels.linear.api import apply
from sage_plugin.kernels.linear.weight import QuantizedWeight, quantize_weight
from tests.kernels.linear.test_linear import inputs

KERNELS = ("fp8_row", "fp8_tensor", "int8_row")


class Layer(torch.nn.Module):
    """Two linears that share their input."""

    def __init__(self, first: QuantizedWeight, second: QuantizedWeight, bias: torch.Tensor) -> None:
        super().__init__()
        self.first, self.second, self.bias = first, second, bias

    def forward(self, x):
        x = torch.nn.functional.gelu(x)
        return apply(x, self.first, self.bias) + apply(x, self.second)


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_graph_serves_all_steps(kernel: str) -> None:
    x, weight, bias = inputs(dtype=torch.bfloat16)
    layer = Layer(quantize_weight(weight, kernel), quantize_weight(weight + 1, kernel), bias)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    with torch.no_grad():
        for step in range(3):
            given = x + step
            # the emulation's fp32 output and torch's bf16 one round once
            torch.testing.assert_close(compiled(given), layer(given), rtol=2**-6, atol=0.05)
    assert counter.frame_count == 1


@pytest.mark.parametrize("kernel", KERNELS)
def test_modes_see_torch_operations(kernel: str) -> None:
    x, weight, bias = inputs(dtype=torch.bfloat16)
    quantized = quantize_weight(weight, kernel)
    graph = make_fx(lambda x: apply(x, quantized, bias))(x)
    names = {str(node.target) for node in graph.graph.nodes}
    assert names & {"aten._scaled_mm.default", "aten._int_mm.default"}
    torch.testing.assert_close(graph(x), apply(x, quantized, bias), rtol=2**-6, atol=0.05)


def test_a_named_kernel_is_traced_with_its_weight() -> None:
    x, weight, bias = inputs(dtype=torch.bfloat16)

    def call(x, weight):
        return sage_plugin.linear(x, weight, bias, kernel="int8_row")

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, weight), call(x, weight))
