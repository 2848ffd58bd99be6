"""Section H: dtypes that are mixed, scales, and gradients."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F

import sage_plugin
from sage_plugin.errors import UnsupportedInputError
from tests.kernels.calls import EMULATED, Shape, launch, relative_l1
from tests.matrix.definition import definition
from tests.reports.machine import allowed, assert_close

kernels = pytest.mark.parametrize("kernel", EMULATED)
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def shape_of(machine):
    return machine.pick(Shape(1, 2, 1, 20, 40, 32), Shape(2, 4, 2, 300, 400, 64))


@kernels
def test_report_89_every_output_dtype(machine, kernel):
    q, k, v = machine.draw(shape_of(machine), BF16)
    fine = machine.attention(kernel, q, k, v, out_dtype=FP32)
    for dtype in (FP16, BF16):
        out = machine.attention(kernel, q, k, v, out_dtype=dtype)
        assert torch.equal(out, fine.to(dtype))


@kernels
@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn], ids=str
)
def test_report_91_the_raw_op_refuses_an_output_of_another_type(machine, kernel, dtype):
    q, k, v = machine.draw(Shape(1, 1, 1, 4, 8, 32))
    numbers = (0.1, False, -1, -1, 0.0, kernel, "portable", "bhsd", launch(32, 32).text(), "")
    for name in ("attention", "attention_with_lse"):
        with pytest.raises(UnsupportedInputError, match="out_dtype"):
            getattr(torch.ops.sage_plugin, name)(q, k, v, None, None, *numbers, dtype)


def test_report_92_positions_and_names_are_those_of_sdpa(machine):
    ours = list(inspect.signature(sage_plugin.attention).parameters.values())[:8]
    assert [p.name for p in ours[3:]] == [
        "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ]  # fmt: skip
    assert [p.default for p in ours[3:]] == [None, 0.0, False, None, False]
    q, k, v = machine.draw(shape_of(machine))
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(9)
    right = F.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), mask, enable_gqa=True, scale=0.2
    )
    out = sage_plugin.attention(
        q, k, v, mask, 0.0, False, 0.2, True, kernel="sage", **machine.options()
    )
    assert relative_l1(out, right) < allowed("sage", 3)


@kernels
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_report_95_a_gradient_falls_back_or_is_refused(machine, kernel, which):
    tensors = list(machine.draw(shape_of(machine), FP32))
    tensors[which].requires_grad_(True)
    with pytest.raises(UnsupportedInputError, match="a gradient is needed"):
        machine.attention(kernel, *tensors)
    sage_plugin.attention(*tensors).square().sum().backward()
    found = tensors[which].grad.clone()
    again = [x.detach().clone().requires_grad_(i == which) for i, x in enumerate(tensors)]
    F.scaled_dot_product_attention(*again, enable_gqa=True).square().sum().backward()
    assert found.abs().sum() > 0
    assert relative_l1(found, again[which].grad) < 1e-3
    with torch.no_grad():
        out = machine.attention(kernel, *tensors)
    assert not out.requires_grad
    assert_close(kernel, out, definition(*(x.detach() for x in tensors))[0], times=3)
