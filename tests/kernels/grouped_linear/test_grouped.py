"""Grouped linears by every backend that a CPU has, beside their definition."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

import sage_plugin
from sage_plugin.errors import UnknownKernelError, UnsupportedInputError
from sage_plugin.kernels.grouped_linear.backends.torch_products import multiply_groups_torch
from sage_plugin.kernels.grouped_linear.call import GroupedLinearCall
from sage_plugin.kernels.grouped_linear.executor import run
from sage_plugin.kernels.grouped_linear.operands import GroupedOperands
from sage_plugin.kernels.grouped_linear.weight import quantize_weights, quantized_weights_once
from sage_plugin.kernels.linear.rows.quantized import quantized_rows
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.schema import LinearLaunch
from tests.kernels.grouped_linear.cases import CASES, COLUMNS, GROUPS, drawn, exact, loss

pytestmark = pytest.mark.usefixtures("interpreted", "nan_scratch")

KERNELS = {"bf16": 0.004, "fp8_row": 0.04, "int8_row": 0.012}
"""Largest relative error of each kernel on normal inputs."""

LAUNCHES = {
    "pointer": LinearLaunch(16, 32, 32, 4, 2, 4),
    "descriptor": LinearLaunch(16, 32, 32, 4, 2, 4, "descriptor", 1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_meet_the_weight_of_their_group(kernel: str, name: str) -> None:
    case = CASES[name]
    x, weights, sizes, bias = drawn(case)
    expected = exact(x, weights, sizes, bias)
    out = sage_plugin.grouped_linear(x, weights, sizes, bias=bias, kernel=kernel)
    assert loss(out, expected) < KERNELS[kernel]
    assert not out[case.used :].any()
    # device code, in Triton's interpreter
    launch = LAUNCHES["descriptor" if kernel == "fp8_row" else "pointer"]
    on_device = sage_plugin.grouped_linear(
        x, weights, sizes, bias=bias, kernel=kernel, backend="triton", launch=launch
    )
    torch.testing.assert_close(on_device, out, rtol=0.01, atol=1e-4)
    assert not on_device[case.used :].any()


@pytest.mark.parametrize("name", ["rows beyond", "sizes past the end", "no rows"])
def test_torch_products_and_the_host_path_have_zeros_beyond_the_groups(name: str) -> None:
    x, weights, sizes, bias = drawn(CASES[name])
    expected = exact(x, weights, sizes, bias)
    operands = GroupedOperands(x, None, weights, None, sizes, bias)
    assert loss(multiply_groups_torch(operands, torch.bfloat16), expected) < 0.01
    assert loss(sage_plugin.grouped_linear(x, weights, sizes, bias=bias), expected) < 0.01


def test_rows_that_torch_cannot_align_are_padded() -> None:
    x, weights, sizes, _ = drawn(CASES["spread"], torch.float32)
    x, weights = x[:, :45], weights[:, :39, :45]
    out = sage_plugin.grouped_linear(x, weights, sizes)
    assert out.shape == (32, 39)
    assert loss(out, exact(x, weights, sizes)) < 1e-5


@pytest.mark.parametrize("backend", ["emulation", "triton"])
@pytest.mark.parametrize("kernel", ["fp8_row", "int8_row"])
def test_special_rows_keep_to_themselves(kernel: str, backend: str) -> None:
    x, weights, sizes, _ = drawn(CASES["spread"])
    plain = sage_plugin.grouped_linear(x, weights, sizes, kernel=kernel, backend=backend)
    x = x.clone()
    x[3, 7], x[8, 1], x[10], x[20] = math.nan, math.inf, 0.0, 3e37
    out = sage_plugin.grouped_linear(x, weights, sizes, kernel=kernel, backend=backend)
    assert (~out.isfinite()).any(1).nonzero().flatten().tolist() == [3, 8]
    assert not out[10].any()
    others = [row for row in range(32) if row not in (3, 8, 10, 20)]
    assert torch.equal(out[others], plain[others])


def test_rows_that_are_quantized_already_are_multiplied_as_they_are() -> None:
    x, weights, sizes, _ = drawn(CASES["spread"])
    quantized = quantize_weights(weights, "int8_row")
    rows = quantized_rows(x, quantized.row_format)
    call = GroupedLinearCall(rows, quantized, sizes, None, torch.bfloat16)
    assert torch.equal(run(call, BackendRequest()), sage_plugin.grouped_linear(x, quantized, sizes))


def test_weights_are_quantized_once_until_they_are_written() -> None:
    weights = torch.randn(GROUPS, COLUMNS, 16)
    first = quantized_weights_once(weights, "int8_row")
    assert quantized_weights_once(weights, "int8_row") is first
    weights[1, 2, 3] = 100.0
    again = quantized_weights_once(weights, "int8_row")
    changed = (again.scale != first.scale).nonzero().tolist()
    assert changed == [[1, 2]]
    assert loss(first.to("cpu").dequantized(), weights.double()) > 0.5
    assert loss(again.dequantized(), weights.double()) < 0.01


def test_a_gradient_flows_through_torchs_own_product() -> None:
    x, weights, sizes, bias = drawn(CASES["rows beyond"], torch.float32)
    tensors = [t.nan_to_num(0.0).requires_grad_() for t in (x, weights, bias)]
    sage_plugin.grouped_linear(tensors[0], tensors[1], sizes, bias=tensors[2]).sum().backward()
    grad = tensors[0].grad
    assert grad is not None
    torch.testing.assert_close(grad[0], weights[0].sum(0))
    assert not grad[32:].any()
    with pytest.raises(UnsupportedInputError, match="a gradient is needed"):
        sage_plugin.grouped_linear(tensors[0], tensors[1], sizes, kernel="fp8_row")


@pytest.mark.parametrize("kernel", ["auto", "bf16", "int8_row"])
@pytest.mark.parametrize("lie", ["turned", "sliced", "repeated"])
def test_strides_are_free(lie: str, kernel: str) -> None:
    x, weights, sizes, _ = drawn(CASES["spread"], torch.float32)
    x, weights = x.nan_to_num(0.0), weights.nan_to_num(0.0)
    if lie == "turned":
        views = x.t().contiguous().t(), weights.transpose(1, 2).contiguous().transpose(1, 2)
    elif lie == "sliced":
        views = (torch.cat((one, one[..., :3]), -1)[..., : x.shape[1]] for one in (x, weights))
    else:
        x, weights = x[:1].expand_as(x), weights[:1].expand_as(weights)
        views = x, weights
    out = sage_plugin.grouped_linear(*views, sizes, kernel=kernel)
    expected = sage_plugin.grouped_linear(x.clone(), weights.clone(), sizes, kernel=kernel)
    torch.testing.assert_close(out, expected)


X, WEIGHTS, SIZES, BIAS = drawn(CASES["spread"])
WRONG = {
    "x is list": ({"x": [1]}, "x is list"),
    "no weights": ({"weights": None}, "weights is NoneType"),
    "sparse": ({"x": X.float().to_sparse()}, "x is a tensor of layout torch.sparse_coo"),
    "doubles": ({"x": X.double()}, "x is torch.float64; cast it to one of torch.float16"),
    "8-bit weights": ({"weights": WEIGHTS.to(torch.int8)}, "weights is torch.int8; cast it to"),
    "bias of integers": ({"bias": BIAS.int()}, "bias is torch.int32; it needs a floating type"),
    "channels": ({"x": X[:, :7]}, "do not fit together"),
    "dimensions": ({"weights": WEIGHTS[0]}, "do not fit together"),
    "int64 sizes": ({"group_sizes": SIZES.long()}, "one torch.int32 for each of 5 groups"),
    "too few sizes": ({"group_sizes": SIZES[:3]}, "one torch.int32 for each of 5 groups"),
    "bias": ({"bias": BIAS[0]}, r"bias is \(40,\); it needs to be \(5, 40\)"),
    "device": ({"group_sizes": SIZES.to("meta")}, "several devices"),
    "out_dtype": ({"out_dtype": torch.int8}, "out_dtype is torch.int8"),
    "two dtypes": ({"weights": WEIGHTS.float(), "kernel": "bf16"}, "needs one dtype of both"),
    "another kernel": (
        {"weights": quantize_weights(WEIGHTS, "int8_row"), "kernel": "fp8_row"},
        "cannot multiply weights of 'int8_row'",
    ),
    "integers": ({"x": X.int(), "kernel": "fp8_row"}, "x is torch.int32; cast it"),
    "torch's product": ({"kernel": "fp8_row", "backend": "torch"}, "torch has no product"),
    "kernel": ({"kernel": "fp8_tensor"}, "kernel 'fp8_tensor' is not known"),
    "backend": ({"kernel": "bf16", "backend": "cuda"}, "backend 'cuda' is not known"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_in_one_sentence(name: str) -> None:
    changes, words = WRONG[name]
    given = {"x": X, "weights": WEIGHTS, "group_sizes": SIZES, "bias": BIAS, **changes}
    x, weights, sizes = (given.pop(key) for key in ("x", "weights", "group_sizes"))
    with pytest.raises((UnsupportedInputError, UnknownKernelError), match=words):
        sage_plugin.grouped_linear(x, weights, sizes, **given)


@pytest.mark.parametrize(("weights", "kernel"), [(WEIGHTS[0], "int8_row"), (WEIGHTS, "fp8_tensor")])
def test_weights_that_cannot_be_quantized_are_refused(weights: torch.Tensor, kernel: str) -> None:
    with pytest.raises((UnsupportedInputError, UnknownKernelError), match="group"):
        quantize_weights(weights, kernel)
