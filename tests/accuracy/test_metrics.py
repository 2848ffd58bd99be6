"""Metrics against hand-computed values and plain fp64 formulas."""

from __future__ import annotations

import math

import pytest
import torch

from sage_plugin.accuracy.metrics import compare
from sage_plugin.measure.inputs import self_attention, synthetic
from tests.accuracy.judged import attention_errors


def rows(*values):
    """One batch, one head."""
    return torch.tensor([[values]], dtype=torch.float64)


def test_hand_computed():
    exact = rows([3.0, 4.0], [0.0, 2.0])
    out = rows([4.0, 3.0], [0.0, 1.0])
    found = compare(out, exact)
    assert found.rel_l1 == pytest.approx(3 / 9)
    assert found.rmse == pytest.approx(math.sqrt(3 / 4))
    assert found.max_abs == 1.0
    assert found.gain == pytest.approx(8 / 9)
    assert found.cosine == pytest.approx(26 / math.sqrt(26 * 29))
    assert found.row_cosine_p10 == pytest.approx(24 / 25)
    assert found.bad_values == 0


def test_centring_subtracts_the_mean_of_v_from_both():
    exact, mean = rows([10.5, 9.5]), rows([10.0, 10.0])
    found = compare(rows([10.6, 9.5]), exact, v_mean=mean)
    assert found.rel_l1 == pytest.approx(0.1 / 20)
    assert found.centred_rel_l1 == pytest.approx(0.1 / 1.0)


def test_rounding_floor_is_what_the_dtype_alone_does():
    exact, mean = rows([1.0 + 2**-9, 1.0]), rows([1.0, 1.0])
    found = compare(exact.float(), exact, v_mean=mean, rounding=torch.bfloat16)
    # bf16 near 1 has steps of 2**-7, so the excess of 2**-9 is lost as a whole.
    assert found.rounding_floor == pytest.approx(1.0)
    assert found.centred_rel_l1 == 0.0


def test_worst_head_is_not_hidden_by_the_good_ones():
    exact = torch.randn(2, 5, 7, 8, dtype=torch.float64)
    out = exact.clone()
    out[1, 3] = -out[1, 3]
    found = compare(out, exact)
    assert found.worst_head_cosine == pytest.approx(-1.0)
    assert found.worst_head_rel_l1 == pytest.approx(2.0)
    assert found.worst_head_row_cosine_p10 == pytest.approx(-1.0)
    assert found.cosine > 0.5
    assert found.row_cosine_p10 == pytest.approx(-1.0)


def test_against_plain_formulas():
    torch.manual_seed(0)
    exact = torch.randn(2, 3, 20, 16, dtype=torch.float64)
    out = exact + 0.01 * torch.randn_like(exact)
    found = compare(out, exact)
    error = out - exact
    row_cosines = torch.nn.functional.cosine_similarity(out, exact, dim=-1).flatten()
    assert found.rel_l1 == pytest.approx((error.abs().sum() / exact.abs().sum()).item())
    assert found.rmse == pytest.approx(error.pow(2).mean().sqrt().item())
    assert found.row_cosine_p10 == pytest.approx(row_cosines.sort().values[11].item())
    assert found.gain == pytest.approx((out.mean() / exact.mean()).item())


def test_bad_values_are_counted_and_leave_finite_metrics():
    exact = rows([1.0, 1.0], [1.0, 1.0])
    found = compare(rows([math.nan, 1.0], [math.inf, 1.0]), exact)
    assert found.bad_values == 2
    assert found.rel_l1 == pytest.approx(0.5)
    assert all(math.isfinite(x) for x in found.to_json().values() if isinstance(x, float))


def test_zero_rows_agree_with_zero_rows_only():
    exact = rows([0.0, 0.0], [1.0, 0.0])
    assert compare(exact, exact).row_cosine_p10 == 1.0
    assert compare(rows([1.0, 0.0], [1.0, 0.0]), exact).row_cosine_p10 == 0.0
    assert compare(exact * 0, exact * 0).cosine == 1.0


def test_shapes_have_to_agree():
    with pytest.raises(ValueError, match="compare: got"):
        compare(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 3, 2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("kernel", "low", "high"),
    [
        ("torch", -1, 0.0),
        ("fav2", 1e-5, 0.004),
        ("sage", 0.004, 0.02),
        ("fav3_sage", 0.02, 0.07),
        ("fav3_fp8", 0.03, 0.09),
    ],
)
def test_centered_error_ranks_the_kernels_under_a_bias_of_v(kernel, low, high, causal):
    q, k, v = synthetic(self_attention(1, 2, 256, 64), device="cpu", distribution="biased")
    found = attention_errors(kernel, "auto", None, q, k, v, causal=causal, scale=None)
    assert low < found.centred_rel_l1 <= high
    assert found.bad_values == 0
    assert found.suspect == ""


def test_a_bf16_output_alone_would_read_as_much_as_quantization():
    q, k, v = synthetic(self_attention(1, 1, 512, 64), device="cpu", distribution="biased")
    found = attention_errors("sage", "auto", None, q, k, v, causal=False, scale=None)
    assert found.rounding_floor > found.centred_rel_l1


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fav2", "sage", "fav3_sage", "fav3_fp8"])
def test_gpu_kernels_read_as_their_emulations_do(kernel):
    shape = self_attention(1, 2, 1000, 64)
    tensors = synthetic(shape, device="cuda", distribution="biased")
    on_gpu = attention_errors(kernel, "portable", None, *tensors, causal=False, scale=None)
    emulated = attention_errors(kernel, "emulation", None, *tensors, causal=False, scale=None)
    assert on_gpu.centred_rel_l1 <= 1.2 * emulated.centred_rel_l1 + 1e-4
    assert on_gpu.bad_values == 0
