"""`linear()`: what it computes, beside the definition in fp64, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

import sage_plugin
from sage_plugin import device
from sage_plugin.errors import UnknownKernelError, UnsupportedInputError
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.kernels.linear.api import apply
from sage_plugin.kernels.linear.backends.torch_products import TorchProducts
from sage_plugin.kernels.linear.call import LinearCall
from sage_plugin.kernels.linear.dispatch import decide
from sage_plugin.kernels.linear.executor import resolve
from sage_plugin.kernels.linear.rows.quantized import quantized_rows
from sage_plugin.kernels.linear.rows.row_format import row_format
from sage_plugin.kernels.linear.weight import quantize_weight
from sage_plugin.kernels.resolver import BackendRequest
from tests.kernels.devices import facts as facts_of

ROWS, IN, OUT = 40, 512, 96
# Rounding to e4m3 costs 2.6 % of a value (half a step of 2^-3, evenly spread), int8 a step of
# amax / 127 over sqrt(12): 0.8 %; two operands sqrt(2) times that.
LOSSES = {
    "bf16": (0.0, 1e-6),
    "fp8_row": (0.031, 0.040),
    "fp8_tensor": (0.031, 0.040),
    "int8_row": (0.007, 0.012),
}


def inputs(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, ROWS // 2, IN), (OUT, IN), (OUT,))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )


def loss(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("backend", ["emulation", "torch"])
@pytest.mark.parametrize("kernel", LOSSES)
def test_the_loss_is_that_of_rounding_both_operands(kernel: str, backend: str) -> None:
    x, weight, _ = inputs()
    out = sage_plugin.linear(x, weight, kernel=kernel, backend=backend)
    low, high = LOSSES[kernel]
    assert low <= loss(out, exact(x, weight)) <= high


@pytest.mark.parametrize("kernel", [*LOSSES][1:])
def test_torch_multiplies_as_the_emulation_does(kernel: str) -> None:
    """But for its output of 16 bits."""
    x, weight, bias = inputs(dtype=torch.bfloat16)
    of = {
        backend: sage_plugin.linear(x, weight, bias, kernel=kernel, backend=backend)
        for backend in ("emulation", "torch")
    }
    torch.testing.assert_close(of["torch"], of["emulation"], rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_the_output_has_the_dtype_asked_for(dtype, out_dtype) -> None:
    x, weight, bias = inputs(dtype=dtype)
    out = sage_plugin.linear(x, weight, bias, kernel="int8_row", out_dtype=out_dtype)
    assert out.dtype == (out_dtype or dtype)
    assert out.shape == (2, ROWS // 2, OUT)
    assert loss(out, exact(x, weight, bias)) < 0.012


@pytest.mark.parametrize("gives_fp16", [True, False])
def test_torch_gives_fp16_rows_or_is_asked_once(monkeypatch, gives_fp16: bool) -> None:
    stock, asked = torch._scaled_mm, []

    def product(*args, out_dtype, **options):
        asked.append(out_dtype)
        if out_dtype == torch.float16 and not gives_fp16:
            raise ValueError("Only bf16 high precision output types are supported")
        return stock(*args, out_dtype=out_dtype, **options)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    x, weight, bias = inputs(dtype=torch.float16)
    rows = quantized_rows(x[0], row_format("fp8_row"))
    products, quantized = TorchProducts(asks=True), quantize_weight(weight, "fp8_row")
    for _ in range(2):
        out = products.multiply(rows, quantized, bias, torch.float16)
        assert out.dtype == torch.float16
        assert loss(out, exact(x[0], weight, bias)) < 0.04
    half, wide = torch.float16, torch.bfloat16
    assert asked == ([half, half] if gives_fp16 else [half, wide, wide])


@pytest.mark.parametrize("kernel", ["fp8_row", "int8_row", "fp8_tensor"])
@pytest.mark.parametrize("backend", ["emulation", "torch"])
def test_a_row_that_is_not_finite_touches_no_other(kernel: str, backend: str) -> None:
    x, weight, bias = inputs()
    x = x[0].clone()
    clean = sage_plugin.linear(x, weight, bias, kernel=kernel, backend=backend)
    x[3, 7], x[5, 0] = math.nan, -math.inf
    out = sage_plugin.linear(x, weight, bias, kernel=kernel, backend=backend)
    bad = ~out.isfinite().all(-1)
    assert bad.nonzero().flatten().tolist() == [3, 5]
    assert not out[bad].isfinite().any()
    if kernel != "fp8_tensor":  # its scale is taken from the finite rows alone
        torch.testing.assert_close(out[~bad], clean[~bad], rtol=0, atol=0)


@pytest.mark.parametrize("kernel", ["fp8_row", "int8_row"])
def test_rows_of_zeros_and_of_huge_and_tiny_numbers(kernel: str) -> None:
    x, weight, _ = inputs()
    x = x[0].clone()
    x[0], x[1], x[2] = 0.0, x[1] * 1e37, x[2] * 1e-20
    weight = weight * 1e-2
    out = sage_plugin.linear(x, weight, kernel=kernel)
    assert out[0].abs().max() == 0.0
    for row in range(1, 4):
        assert loss(out[row], exact(x[row], weight)) < 0.05, row


def test_a_channel_of_a_weight_that_is_not_finite_touches_no_other() -> None:
    x, weight, _ = inputs()
    weight[4, 2] = math.inf
    out = sage_plugin.linear(x[0], weight, kernel="fp8_row")
    assert (~out.isfinite()).all(0).nonzero().flatten().tolist() == [4]
    assert out[:, 5:].isfinite().all()


def test_strided_inputs_are_read_in_place() -> None:
    x, weight, _ = inputs()
    wide = torch.cat([x, x + 1], -1)
    strided = sage_plugin.linear(wide[..., :IN], weight, kernel="fp8_row")
    assert torch.equal(strided, sage_plugin.linear(x, weight, kernel="fp8_row"))
    turned = sage_plugin.linear(x, weight.t().contiguous().t(), kernel="fp8_row")
    assert torch.equal(turned, strided)


def test_a_weight_that_was_written_is_quantized_anew() -> None:
    x, weight, _ = inputs()
    before = sage_plugin.linear(x, weight, kernel="int8_row")
    weight.mul_(2.0)
    assert torch.equal(sage_plugin.linear(x, weight, kernel="int8_row"), 2 * before)


WRONG = (
    ({"x": torch.ones(2, 3)}, "x (2, 3) and weight"),
    ({"weight": torch.ones(OUT)}, "do not fit together"),
    ({"bias": torch.ones(3)}, "bias is (3,)"),
    ({"x": 3}, "x is int"),
    ({"x": None}, "x is NoneType"),
    ({"weight": None}, "weight is NoneType"),
    ({"x": torch.ones(2, IN).to_sparse()}, "x is a tensor of layout torch.sparse_coo"),
    ({"bias": torch.ones(OUT, dtype=torch.int32)}, "bias is torch.int32"),
    ({"x": torch.ones(2, IN).int(), "kernel": "auto"}, "of one dtype, and these are x torch.int32"),
    ({"weight": torch.ones(OUT, IN).half(), "kernel": "bf16"}, "weight torch.float16, bias torch"),
    ({"bias": torch.ones(OUT).half(), "kernel": "bf16"}, "bias torch.float16; cast them"),
    ({"prologue": "gelu"}, "prologue is 'gelu'; give a sage_plugin.Prologue"),
    ({"x": [1.0], "prologue": sage_plugin.Prologue("gelu")}, "x is list"),
    ({"out_dtype": torch.int8}, "out_dtype is torch.int8"),
    ({"x": torch.ones(2, IN, dtype=torch.float64)}, "dtype float64 is not supported"),
    ({"x": torch.ones(2, IN, requires_grad=True)}, "a gradient is needed"),
    ({"x": torch.ones(0, IN)}, "the call is empty"),
)


@pytest.mark.parametrize(("changed", "message"), WRONG)
def test_what_does_not_fit_is_refused_by_name(changed, message: str) -> None:
    x, weight, bias = inputs()
    given = {"x": x, "weight": weight, "bias": bias, "kernel": "fp8_row"} | changed
    with pytest.raises(UnsupportedInputError) as caught:
        sage_plugin.linear(**given)
    assert message in str(caught.value)


def test_dtypes_that_autocast_makes_equal_are_those_of_no_mistake() -> None:
    x, weight, bias = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = sage_plugin.linear(x, weight.bfloat16(), bias)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("kernel", ["bf16", "fp8_row", "fp8_tensor", "int8_row"])
def test_one_row_may_have_no_dimension_of_rows(kernel: str) -> None:
    x, weight, bias = inputs()
    alone = sage_plugin.linear(x[0, 0], weight, bias, kernel=kernel)
    expected = sage_plugin.linear(x[0, :1], weight, bias, kernel=kernel)
    torch.testing.assert_close(alone, expected[0])


@pytest.mark.parametrize("names", [{"kernel": "sage"}, {"backend": "hopper", "kernel": "fp8_row"}])
def test_unknown_names_list_the_known_ones(names) -> None:
    x, weight, _ = inputs()
    with pytest.raises(UnknownKernelError, match=r"fp8_row|emulation"):
        sage_plugin.linear(x, weight, **names)


def test_auto_leaves_what_needs_a_gradient_and_what_is_on_a_cpu() -> None:
    x, weight, bias = inputs()
    expected = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(sage_plugin.linear(x, weight, bias), expected)
    call = LinearCall(x, weight, bias)
    assert resolve(call, BackendRequest()) == FallbackReason(Fallback.LINEAR_ON_CPU)
    weight.requires_grad_()
    sage_plugin.linear(x, weight, bias).sum().backward()
    assert weight.grad is not None


def test_apply_lets_a_gradient_through_the_weight_as_it_is_in_8_bits() -> None:
    x, weight, bias = inputs()
    quantized = quantize_weight(weight, "int8_row")
    x.requires_grad_()
    apply(x, quantized, bias).sum().backward()
    expected = quantized.dequantized().sum(0).expand_as(x)
    torch.testing.assert_close(x.grad, expected)
    assert apply(torch.ones(0, IN), quantized).shape == (0, OUT)


LARGE = {"sm_90": ("fp8_row", "torch"), "cpu": ("bf16", "host")}


def on(arch: str, rows: int = 8192, features: tuple[int, int] = (2048, 2048)) -> LinearCall:
    with torch.device("meta"):
        x = torch.empty(rows, features[0], dtype=torch.bfloat16)
        return LinearCall(x, torch.empty(features[1], features[0], dtype=torch.bfloat16))


@pytest.mark.parametrize("arch", LARGE)
def test_auto_takes_the_fastest_backend_of_facts_of(arch: str) -> None:
    facts = device.facts("cpu") if arch == "cpu" else facts_of(arch)
    decision = decide(on(arch), facts, BackendRequest())
    assert (decision.kernel, decision.variant) == LARGE[arch]


LEFT = (
    ("sm_90", {"rows": 64}, {}, Fallback.SMALL_LINEAR),
    ("sm_90", {"features": (8192, 512)}, {}, Fallback.SMALL_LINEAR),
    ("sm_80", {}, {"kernel": "fp8_row", "backend": "torch"}, Fallback.NO_TORCH_PRODUCT),
    ("sm_90", {"features": (2044, 2048)}, {"kernel": "fp8_row", "backend": "torch"},
     Fallback.FEATURES),
)  # fmt: skip


@pytest.mark.parametrize(("arch", "shape", "names", "cause"), LEFT)
def test_what_is_left_has_its_cause(arch: str, shape, names, cause: Fallback) -> None:
    decision = decide(on(arch, **shape), facts_of(arch), BackendRequest(**names))
    assert decision.kernel == "bf16"
    assert decision.reason is not None
    assert decision.reason.cause is cause
