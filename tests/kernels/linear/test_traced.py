"""Quantized linears in compiled graphs and under torch's modes."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._functorch.aot_autograd import aot_module_simplified
from torch.fx.experimental.proxy_tensor import make_fx

import sage_plugin
from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels import launch_config
from sage_plugin.kernels.linear import torch_ops, traced
from sage_plugin.kernels.linear.api import apply
from sage_plugin.kernels.linear.backends import torch_products
from sage_plugin.kernels.linear.rows.prologue import Prologue
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
    emulated = kernel == "fp8_row" and not torch_products.ROW_SCALES_ON_CPU
    product = "mm" if emulated else "_int_mm" if kernel == "int8_row" else "_scaled_mm"
    assert f"aten.{product}.default" in names
    torch.testing.assert_close(graph(x), apply(x, quantized, bias), rtol=2**-6, atol=0.05)


def test_rows_have_scales_where_torch_takes_none(monkeypatch) -> None:
    """The product of torch 2.11 on a CPU."""
    monkeypatch.setattr(torch_products, "ROW_SCALES_ON_CPU", False)
    x, weight, bias = inputs(dtype=torch.bfloat16)
    quantized = quantize_weight(weight, "fp8_row")
    graph = make_fx(lambda x: apply(x, quantized, bias))(x)
    assert "aten._scaled_mm.default" not in {str(node.target) for node in graph.graph.nodes}
    assert torch.equal(graph(x), apply(x, quantized, bias))
    compiled = torch.compile(lambda x: apply(x, quantized, bias), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), graph(x))
    launch_config.forget()
    with pytest.raises(UnsupportedInputError, match="torch has no product of fp8_row on"):
        sage_plugin.linear(x, quantized, bias, backend="torch")
    launch_config.forget()


def test_a_named_kernel_is_traced_with_its_weight() -> None:
    x, weight, bias = inputs(dtype=torch.bfloat16)

    def call(x, weight):
        return sage_plugin.linear(x, weight, bias, kernel="int8_row")

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, weight), call(x, weight))


@pytest.fixture
def on_gpu(monkeypatch):
    """Have ops quantize and multiply, as on a GPU."""
    monkeypatch.setattr(traced, "has_ops", lambda x: True)


def graph_of(function, *args: torch.Tensor) -> tuple[list[str], object]:
    """Names of the operations that a compiler gets of a function, and what the graph answers."""
    seen: list[str] = []

    def compiler(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    backend = functools.partial(aot_module_simplified, fw_compiler=compiler)
    with torch.no_grad():
        return seen, torch.compile(function, fullgraph=True, backend=backend)(*args)


READERS = {
    "three readers": (lambda x: x, 1),
    "written between": (lambda x: x.mul_(2.0), 2),
    "another tensor": (lambda x: x * 2.0, 2),
}


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("between", READERS)
def test_a_graph_quantizes_an_input_once_for_all_readers(kernel: str, between: str) -> None:
    x, weight, bias = inputs(dtype=torch.bfloat16)
    weights = [quantize_weight(weight + step, kernel) for step in range(3)]
    change, count = READERS[between]

    def block(x):
        x = torch.nn.functional.gelu(x)
        first = apply(x, weights[0], bias)
        x = change(x)
        return first, apply(x, weights[1]), apply(x, weights[2])

    seen, outs = graph_of(block, x)
    assert sum(name == "sage_plugin.quantize_rows.default" for name in seen) == count
    for out, expected in zip(outs, block(x), strict=True):
        torch.testing.assert_close(out, expected, rtol=2**-6, atol=0.05)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("kind", ["gelu_tanh", "swiglu", "layer_norm"])
def test_a_graph_has_one_pass_for_a_prologue_and_the_quantization(kind: str) -> None:
    x, weight, bias = inputs(dtype=torch.bfloat16)
    prologue = Prologue(kind, gate=x + 1 if kind == "swiglu" else None)
    quantized = quantize_weight(weight, "fp8_row")
    seen, out = graph_of(lambda x: apply(x, quantized, bias, prologue=prologue), x)
    names = {name for name in seen if name.startswith(("aten", "sage_plugin"))}
    assert names <= {
        "sage_plugin.quantize_rows.default", "sage_plugin.multiply_rows.default",
        "aten.view.default", "aten._scaled_mm.default", "aten.t.default", "aten.add.Tensor",
    }  # fmt: skip
    expected = apply(x, quantized, bias, prologue=prologue)
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=0.05)


def test_graphs_leave_nothing_behind(on_gpu) -> None:
    x, weight, _ = inputs(dtype=torch.bfloat16)
    quantized = quantize_weight(weight, "int8_row")
    graph_of(lambda x: apply(x * 2, quantized), x)
    gc.collect()
    assert torch_ops._traced.made == []


OPS = (
    ("fp8_row", {}, "none", False),
    ("fp8_tensor", {}, "gelu", False),
    ("int8_row", {"asymmetric": True}, "rms_norm", True),
)


@pytest.mark.parametrize(("kernel", "options", "kind", "keep"), OPS)
def test_the_ops_are_what_their_fakes_say(kernel: str, options, kind: str, keep: bool) -> None:
    x, weight, bias = inputs(dtype=torch.bfloat16)
    quantized = quantize_weight(weight, kernel, **options)
    form = quantized.row_format
    args = (
        x, None, *Prologue(kind).tensors(), kind, 1e-6, form.dtype, form.per_tensor,
        form.rotation, form.asymmetric, keep,
    )  # fmt: skip
    # What checks a schema multiplies the outputs, which FP8 numbers cannot be.
    checks = ("test_schema", "test_faketensor")[0 if kernel == "int8_row" else 1 :]
    torch.library.opcheck(torch.ops.sage_plugin.quantize_rows, args, test_utils=checks)
    rows, kept = torch_ops.quantize_by_op(x, form, None, Prologue(kind), keep=keep)
    assert (kept is not None) == keep
    args = (
        rows.data, rows.scale, rows.offset, rows.sums, quantized.data, quantized.scale,
        quantized.offset, quantized.sums, bias, kernel, torch.bfloat16,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.sage_plugin.multiply_rows, args, test_utils=checks)
    out = torch_ops.multiply_by_op(rows, quantized, bias, torch.bfloat16)
    expected = apply(x, quantized, bias, prologue=Prologue(kind)).flatten(0, -2)
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=0.05)
