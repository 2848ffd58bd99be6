"""Quantized weights, their options, and the inputs that are remembered beside them."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch

import sage_plugin
from sage_plugin import device
from sage_plugin.errors import UnknownKernelError, UnsupportedInputError
from sage_plugin.kernels.linear.activation import forget_rows, quantize_rows
from sage_plugin.kernels.linear.rows.quantized import quantized_rows
from sage_plugin.kernels.linear.rows.row_format import row_format
from sage_plugin.kernels.linear.weight import quantize_weight, smoothing
from sage_plugin.kernels.linear.weight_memo import quantized_once
from tests.kernels.linear.test_linear import IN, OUT, exact, inputs, loss


def error(x: torch.Tensor, weight: torch.Tensor, kernel: str, **options) -> float:
    quantized = quantize_weight(weight, kernel, **options)
    return loss(sage_plugin.linear(x, quantized), exact(x, weight))


def test_known_numbers() -> None:
    """By hand: 127 is the largest of its row, 0.5 a half that rounds to even."""
    quantized = quantize_weight(torch.tensor([[127.0, 0.5, -1.5], [0.0, 0.0, 0.0]]), "int8_row")
    assert quantized.data.tolist() == [[127, 0, -2], [0, 0, 0]]
    assert quantized.scale[0] == 1.0
    assert quantized.dequantized().tolist() == [[127.0, 0.0, -2.0], [0.0, 0.0, 0.0]]
    assert (quantized.in_features, quantized.out_features, quantized.nbytes) == (3, 2, 6 + 8)


def test_a_weight_is_quantized_the_same_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight, _ = inputs()
    whole = quantize_weight(weight, "int8_row", asymmetric=True)
    monkeypatch.setattr("sage_plugin.kernels.linear.weight.CHUNK_VALUES", 7 * weight.shape[1])
    for one, other in zip(
        quantize_weight(weight, "int8_row", asymmetric=True).tensors(), whole.tensors(), strict=True
    ):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("kernel", ["fp8_row", "int8_row"])
def test_smoothing_and_rotation_help_where_a_channel_sticks_out(kernel: str) -> None:
    x, weight, _ = inputs()
    x = x[0].clone()
    x[:, 11] *= 200.0
    plain = error(x, weight, kernel)
    smooth = smoothing(x.abs().amax(0), weight)
    # FP8 has the same relative precision for large and small values, INT8 has not.
    assert error(x, weight, kernel, smooth=smooth) < (0.35 if kernel == "int8_row" else 1.1) * plain
    if kernel == "int8_row":
        assert error(x, weight, kernel, rotation=128) < 0.6 * plain


def test_offsets_pay_on_shifted_inputs_and_cost_nothing_on_others() -> None:
    """The weight is exact in 8 bits either way: what is seen is the loss of the inputs."""
    x = inputs()[0]
    weight = torch.randint(-127, 128, (OUT, IN), generator=torch.Generator().manual_seed(1)).float()
    weight[:, 0], weight[:, 1] = 127.0, -127.0
    assert error(x, weight, "int8_row", asymmetric=True) < 1.02 * error(x, weight, "int8_row")
    shifted = x.abs() + 2.0
    own = error(shifted, weight, "int8_row", asymmetric=True)
    assert own < 0.45 * error(shifted, weight, "int8_row")


def test_constant_rows_are_exact_with_offsets() -> None:
    x, weight = torch.full((3, 64), 7.25), torch.full((16, 64), -0.3)
    out = sage_plugin.linear(x, quantize_weight(weight, "int8_row", asymmetric=True))
    torch.testing.assert_close(out, x @ weight.t())


def test_dequantized_undoes_smoothing_and_rotation() -> None:
    _, weight, _ = inputs()
    smooth = torch.linspace(0.7, 1.4, weight.shape[1])
    quantized = quantize_weight(weight, "int8_row", smooth=smooth, rotation=32)
    assert loss(quantized.dequantized(), weight.double()) < 0.015


WRONG = (
    ({"weight": torch.ones(4)}, UnsupportedInputError, "two dimensions"),
    ({"weight": torch.ones(4, 4, dtype=torch.int8)}, UnsupportedInputError, "floating"),
    ({"kernel": "bf16"}, UnknownKernelError, "fp8_row"),
    ({"rotation": 48}, UnsupportedInputError, "rotation 48"),
    ({"rotation": 64, "weight": torch.ones(4, 96)}, UnsupportedInputError, "does not divide"),
    ({"weight": torch.ones(4, 4).to_sparse()}, UnsupportedInputError, "of layout torch.sparse"),
    ({"smooth": torch.ones(3)}, UnsupportedInputError, "smooth is (3,)"),
    ({"smooth": [1.0]}, UnsupportedInputError, "smooth is list"),
    ({"smooth": torch.zeros(64)}, UnsupportedInputError, "above 0"),
    ({"asymmetric": True}, UnsupportedInputError, "int8_row"),
)


@pytest.mark.parametrize(("changed", "kind", "message"), WRONG)
def test_what_cannot_be_quantized_is_refused(changed, kind, message: str) -> None:
    with pytest.raises(kind) as caught:
        quantize_weight(**{"weight": torch.ones(4, 64), "kernel": "fp8_row"} | changed)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("largest", "message"),
    [
        ([1.0], "largest is list"),
        (torch.ones(3), "largest is (3,)"),
        (-torch.ones(64), "below 0 or not finite"),
        (torch.full((64,), torch.nan), "below 0 or not finite"),
    ],
)
def test_magnitudes_that_are_none_are_refused(largest, message: str) -> None:
    with pytest.raises(UnsupportedInputError) as caught:
        smoothing(largest, torch.ones(4, 64))
    assert message in str(caught.value)


class Quantizer:
    """Counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x, form, smooth):
        self.calls += 1
        return quantized_rows(x, form, smooth)


@pytest.fixture
def counted() -> Quantizer:
    forget_rows()
    return Quantizer()


FORM = row_format("int8_row")


def test_an_input_is_quantized_once_for_those_that_read_it(counted: Quantizer) -> None:
    x, other = torch.randn(4, 32), torch.randn(4, 32)
    first = quantize_rows(x, FORM, None, counted)
    quantize_rows(other, FORM, None, counted)
    assert quantize_rows(x, FORM, None, counted) is first
    assert counted.calls == 2


CHANGES = {
    "written": lambda x: x.mul_(2.0),
    "another view": lambda x: x.view(4, 32),
    "another": lambda x: x.clone(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_the_same_is_quantized_anew(counted: Quantizer, change: str) -> None:
    x = torch.randn(4, 32)
    quantize_rows(x, FORM, None, counted)
    quantize_rows(CHANGES[change](x), FORM, None, counted)
    assert counted.calls == 2


def test_another_format_or_smoothing_is_quantized_anew(counted: Quantizer) -> None:
    x = torch.randn(4, 32)
    for form, smooth in (
        (FORM, None), (row_format("fp8_row"), None), (FORM, torch.ones(32)), (FORM, torch.ones(32))
    ):  # fmt: skip
        quantize_rows(x, form, smooth, counted)
    assert counted.calls == 4


def test_inputs_of_inference_mode_are_not_remembered(counted: Quantizer) -> None:
    """Torch keeps no account of their writes."""
    with torch.inference_mode():
        x = torch.randn(4, 32)
        first = quantize_rows(x, FORM, None, counted)
        x.mul_(2.0)
        assert not torch.equal(quantize_rows(x, FORM, None, counted).scale, first.scale)


def test_nothing_outlives_its_input(counted: Quantizer) -> None:
    x, weight = torch.randn(4, 32), torch.randn(8, 32)
    kept = [weakref.ref(quantize_rows(x, FORM, None, counted).data)]
    kept.append(weakref.ref(quantized_once(weight, "int8_row", quantize_weight).data))
    assert all(one() is not None for one in kept)
    del x, weight
    assert [one() for one in kept] == [None, None]


@pytest.mark.parametrize(
    ("arch", "kernel", "shape", "best"),
    [
        ("sm_90", "fp8_row", (32, 64), True),
        ("sm_100", "fp8_tensor", (32, 64), True),
        ("sm_89", "fp8_row", (32, 64), False),
        ("sm_90", "int8_row", (32, 64), False),
        ("sm_90", "fp8_row", (24, 64), False),
        ("sm_90", "fp8_row", (32, 40), False),
    ],
)
def test_a_weight_knows_whether_torch_multiplies_it_best(arch, kernel, shape, best, monkeypatch):
    facts = device.facts("cpu")
    monkeypatch.setattr(device, "facts_of", lambda *_: dataclasses.replace(facts, arch=arch))
    monkeypatch.setattr("sage_plugin.kernels.linear.weight._known", {})
    assert quantize_weight(torch.ones(shape), kernel).best_by_torch is best
