"""The oracle against attention written out in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from sage_plugin.kernels.attention import oracle as home
from sage_plugin.kernels.attention.oracle import OracleKernel, oracle
from sage_plugin.kernels.contract import AttentionParams, bhsd
from tests.kernels.calls import Shape, draw
from tests.kernels.problems import mask_of
from tests.matrix.definition import defined


def by_hand(q, k, v, *, causal, scale):
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1).double() for t in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * scale
    if causal:
        rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
        scores = scores.masked_fill(keys > rows + k.shape[2] - q.shape[2], -math.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return weights @ v, torch.logsumexp(scores, -1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(2, 4, 2, 17, 29, 24), Shape(1, 2, 1, 29, 17, 8), Shape(1, 1, 1, 1, 1, 3)],
    ids=str,
)
def test_matches_fp64_by_hand(shape, causal):
    q, k, v = draw(shape)
    expected, expected_lse = by_hand(q, k, v, causal=causal, scale=shape.dim**-0.5)
    out, lse = oracle(q, k, v, is_causal=causal, dtype=torch.float64)
    assert torch.allclose(out, expected, atol=1e-10)
    assert torch.allclose(lse, expected_lse, atol=1e-10)


def test_rows_layout_and_scale():
    q, k, v = draw(Shape(1, 2, 2, 40, 30, 16))
    rows = torch.tensor([0, 7, 39])
    whole, lse = oracle(q, k, v, is_causal=True, scale=0.3)
    some, some_lse = oracle(q, k, v, is_causal=True, scale=0.3, rows=rows)
    assert torch.allclose(some, whole[:, :, rows], atol=1e-6)
    assert torch.allclose(some_lse, lse[:, :, rows], atol=1e-6)
    turned = oracle(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, scale=0.3, layout="bshd"
    )
    assert torch.allclose(turned[0].transpose(1, 2), whole, atol=1e-6)


def test_chunks_do_not_change_the_result(monkeypatch):
    q, k, v = draw(Shape(1, 2, 2, 50, 30, 16))
    whole, _ = oracle(q, k, v)
    monkeypatch.setattr(home, "CHUNK_ELEMENTS", 90)
    assert torch.allclose(oracle(q, k, v)[0], whole, atol=1e-6)


def test_masks_are_in_natural_log_units():
    q, k, v = draw(Shape(1, 2, 2, 10, 20, 16))
    bias = torch.zeros(1, 1, 1, 20)
    bias[..., 10:] = -math.inf
    expected, expected_lse = oracle(q, k[:, :, :10], v[:, :, :10])
    for mask in (bias, bias == 0, bias.clamp_min(-2e38)):
        hidden, lse = oracle(q, k, v, mask=mask)
        assert torch.allclose(hidden, expected, atol=1e-6)
        assert torch.allclose(lse, expected_lse, atol=1e-6)
    same, lse = oracle(q, k, v, mask=torch.full((1, 1, 1, 20), math.log(2.0)))
    plain, plain_lse = oracle(q, k, v)
    assert torch.allclose(same, plain, atol=1e-6)
    assert torch.allclose(lse, plain_lse + math.log(2.0), atol=1e-6)


def test_masks_windows_caps_and_sinks_follow_the_rows_asked_for(monkeypatch):
    shape = Shape(2, 4, 2, 50, 30, 16)
    q, k, v = draw(shape)
    problem = AttentionParams(
        0.3, True, "bhsd", mask_of("dead_rows", shape), (9, -1), 3.0, torch.ones(4)
    )
    options = {
        "is_causal": True, "scale": 0.3, "mask": problem.mask, "window": (9, -1), "softcap": 3.0,
        "sinks": torch.ones(4), "dtype": torch.float64,
    }  # fmt: skip
    expected, expected_lse = defined(q, k, v, problem)
    rows = torch.tensor([49, 3, 20, 21])
    for limit in (1 << 26, 90):
        monkeypatch.setattr(home, "CHUNK_ELEMENTS", limit)
        out, lse = oracle(q, k, v, rows=rows, **options)
        assert torch.allclose(out, expected[:, :, rows], atol=1e-10)
        assert torch.allclose(lse, expected_lse[:, :, rows], atol=1e-10)


def test_a_large_bias_costs_no_digits_of_the_output():
    q, k, v = draw(Shape(1, 1, 1, 4, 20, 16))
    out, _ = oracle(q, k, v, scale=0.0, mask=torch.full((1, 1, 1, 20), -1e30))
    assert torch.allclose(out, v.mean(2, keepdim=True).expand_as(out), atol=1e-6)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_kernel_passes_on_everything_that_a_problem_has(layout):
    shape = Shape(2, 4, 2, 20, 30, 16)
    q, k, v = draw(shape, layout=layout)
    problem = AttentionParams(
        0.3, True, layout, mask_of("float", shape), (9, -1), 3.0, torch.ones(4)
    )
    kernel = OracleKernel()
    operands = kernel.prepare(q, k, v, problem=problem, launch=None)
    out, lse = kernel.launch(operands, return_lse=True)
    expected, expected_lse = defined(*(bhsd(x, layout) for x in (q, k, v)), problem)
    assert out.shape == q.shape
    assert torch.allclose(bhsd(out, layout).double(), expected, atol=1e-5)
    assert torch.allclose(lse.double(), expected_lse, atol=1e-5)
    assert lse.is_contiguous()


def test_matmul_precision_of_the_caller_is_kept():
    torch.set_float32_matmul_precision("high")
    try:
        oracle(*draw(Shape(1, 1, 1, 4, 4, 8)))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_torchs_newer_precision_switch_is_kept():
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has the older switch only")
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        oracle(*draw(Shape(1, 1, 1, 4, 4, 8)))
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
