"""Norms and activations in front of linears, in one pass with the quantization."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.linear import quantizer
from sage_plugin.kernels.linear.activation import forget_rows
from sage_plugin.kernels.linear.api import apply, linear, normalized
from sage_plugin.kernels.linear.rows.prologue import NO_PROLOGUE, Prologue, prologued
from sage_plugin.kernels.linear.weight import quantize_weight
from tests.kernels.linear.test_linear import IN, exact, inputs, loss

x, weight, bias = inputs()
MODULATION = torch.rand(3, 2, 1, IN, generator=torch.Generator().manual_seed(7))
NORM = Prologue("layer_norm", factor=1 + MODULATION[0], shift=MODULATION[1])
PROLOGUES = (
    Prologue("gelu"), Prologue("gelu_tanh"), Prologue("swiglu", gate=x.flip(0)), NORM,
    Prologue("rms_norm", weight=MODULATION[2, 0, 0]),
)  # fmt: skip


@pytest.mark.parametrize("prologue", PROLOGUES, ids=lambda one: one.kind)
def test_a_linear_of_what_comes_before(prologue: Prologue) -> None:
    quantized = quantize_weight(weight, "int8_row")
    out = linear(x, quantized, bias, prologue=prologue)
    made = prologued(x, prologue)
    assert loss(out, exact(made, weight, bias)) < 0.025
    torch.testing.assert_close(out, apply(made, quantized, bias), rtol=0, atol=0.1)


@pytest.fixture
def passes(monkeypatch) -> list[str]:
    """Prologues of the passes over activations."""
    forget_rows()
    made: list[str] = []
    stock = quantizer.RowQuantizer.__call__

    def counted(self, x, form, smooth=None, prologue=NO_PROLOGUE, kept=None):
        made.append(prologue.kind)
        return stock(self, x, form, smooth, prologue, kept)

    monkeypatch.setattr(quantizer.RowQuantizer, "__call__", counted)
    return made


def test_a_norm_quantizes_for_all_linears_that_read_it(passes: list[str]) -> None:
    readers = [quantize_weight(weight + step, "fp8_row") for step in range(3)]
    made = normalized(x.bfloat16(), NORM, readers[0])
    outs = [apply(made, reader) for reader in readers]
    assert passes == ["layer_norm"]
    expected = prologued(x.bfloat16(), NORM)
    assert torch.equal(made, expected.bfloat16())
    for out, reader in zip(outs, readers, strict=True):
        assert torch.equal(out, apply(expected, reader, out_dtype=torch.bfloat16))
    made.mul_(2.0)
    apply(made, readers[0])
    assert passes[-1] == "none"


def test_a_reader_of_another_format_quantizes_for_itself(passes: list[str]) -> None:
    made = normalized(x, NORM, quantize_weight(weight, "fp8_row"))
    apply(made, quantize_weight(weight, "int8_row"))
    assert passes == ["layer_norm", "none"]


def test_compiled_graphs_have_torch_operations() -> None:
    quantized = quantize_weight(weight, "fp8_row")

    def block(x):
        y = normalized(x, NORM, quantized)
        return linear(y, quantized, prologue=Prologue("gelu_tanh")) + apply(y, quantized)

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    with torch.no_grad():
        assert loss(compiled(x), block(x).double()) < 2**-8  # torch's product gives 16 bits
        compiled(x + 1)
    assert counter.frame_count == 1


def test_gradients_go_through_torch_operations() -> None:
    given = x.clone().requires_grad_()
    quantized = quantize_weight(weight, "int8_row")
    y = normalized(given, NORM, quantized)
    apply(y, quantized, prologue=Prologue("gelu")).sum().backward()
    assert given.grad.abs().max() > 0


WRONG = (
    (Prologue("relu"), "prologue 'relu'"),
    (Prologue("swiglu"), "gate"),
    (Prologue("gelu", factor=torch.ones(IN)), "belongs to"),
    (Prologue("swiglu", gate=torch.ones(3)), "gate is (3,)"),
    (Prologue("rms_norm", weight=torch.ones(3)), "weight is (3,)"),
    (Prologue("layer_norm", shift=torch.ones(7, 1, IN)), "does not broadcast"),
)


@pytest.mark.parametrize(("prologue", "message"), WRONG)
def test_a_prologue_that_does_not_fit_is_refused(prologue: Prologue, message: str) -> None:
    with pytest.raises(UnsupportedInputError) as caught:
        linear(x, quantize_weight(weight, "fp8_row"), prologue=prologue)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"norm": Prologue("gelu")}, "norm is 'gelu'; choose one of layer_norm, rms_norm"),
        ({"norm": "rms_norm"}, "prologue is 'rms_norm'; give a sage_plugin.Prologue"),
        ({"reader": weight}, "reader is Tensor; give what quantize_weight made"),
        ({"x": x[..., :16]}, f"reader has {IN} in_features and x {(*x.shape[:-1], 16)} has 16"),
        ({"x": [1.0]}, "x is list"),
    ],
)
def test_a_norm_or_a_reader_that_does_not_fit_is_refused(changed, message: str) -> None:
    given = {"x": x, "norm": Prologue("rms_norm"), "reader": quantize_weight(weight, "int8_row")}
    with pytest.raises(UnsupportedInputError) as caught:
        normalized(**given | changed)
    assert message in str(caught.value)


def test_torchs_own_linear_has_what_comes_before() -> None:
    for kernel in ("auto", "bf16"):
        out = linear(x, weight, bias, kernel=kernel, prologue=NORM)
        assert loss(out, exact(prologued(x, NORM), weight, bias)) < 1e-6


def test_a_gradient_flows_to_a_modulation() -> None:
    factor = MODULATION[0].clone().requires_grad_()
    linear(x, weight, prologue=Prologue("layer_norm", factor=factor)).sum().backward()
    quantized = quantize_weight(weight, "int8_row")
    apply(x, quantized, prologue=Prologue("layer_norm", factor=factor)).sum().backward()
    assert factor.grad.abs().max() > 0
