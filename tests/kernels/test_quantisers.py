"""The quantisers' torch twins: scales by hand, and bounds on what rounding may cost."""

from __future__ import annotations

import math

import pytest
import torch

from sage_plugin.kernels.quant.recipe import LOG2E, Recipe
from sage_plugin.kernels.quant.reference import quantise_k, quantise_q, quantise_v, round_to

INT8 = Recipe(qk="int8", pv="fp8")
FP8 = Recipe(qk="fp8", pv="fp8")
FP16 = Recipe(qk="int8", pv="fp16")


def test_q_has_one_scale_a_row_with_the_softmax_scale_folded_in():
    q = torch.tensor([[[[1.0, -2.0], [0.5, 0.25]]]])
    found = quantise_q(q, scale=0.5, recipe=INT8)
    assert found.values.tolist() == [[[[64, -127], [127, 64]]]]
    assert torch.allclose(found.scale, torch.tensor([[[2.0, 0.5]]]) * 0.5 * LOG2E / 127)


def test_k_loses_its_mean_and_has_one_scale_a_block():
    k = torch.tensor([[[[5.0], [7.0], [5.0], [4.0], [9.0]]]])
    found = quantise_k(k, block_n=2, smooth=True, recipe=INT8)
    assert found.mean.item() == 6.0
    assert found.values.shape == (1, 1, 3, 2, 1)
    assert found.values.flatten().tolist() == [-127, 127, -64, -127, 127, 0]
    assert torch.allclose(found.scale.flatten(), torch.tensor([1.0, 2.0, 3.0]) / 127)
    kept = quantise_k(k, block_n=2, smooth=False, recipe=INT8)
    assert kept.mean.item() == 0.0
    assert torch.allclose(kept.scale.flatten(), torch.tensor([7.0, 5.0, 9.0]) / 127)


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize(("recipe", "step"), [(INT8, 2**-4), (FP16, 2**-11)], ids=["fp8", "fp16"])
def test_v_comes_back_within_half_a_step(recipe, step, smooth):
    v = torch.randn(1, 2, 37, 8) * 5 + 20
    found = quantise_v(v, block_n=16, smooth=smooth, recipe=recipe)
    back = (
        found.values.float().reshape(1, 2, 48, 8) * found.scale[:, :, None] + found.mean[:, :, None]
    )
    error = (back[:, :, :37] - v).abs()
    span = (v - found.mean[:, :, None]).abs()
    floor = found.scale[:, :, None] * 2**-9
    assert (error <= span * step + floor + 1e-5).all()
    assert (found.values.float().reshape(1, 2, 48, 8)[:, :, 37:] == 0).all()


def test_wide_values_get_a_scale_in_fp16():
    v = torch.tensor([7e4, -3e6, 1.0]).view(1, 1, 3, 1)
    found = quantise_v(v, block_n=16, smooth=False, recipe=FP16)
    assert torch.isfinite(found.values.float()).all()
    back = found.values.float().flatten()[:3] * found.scale.item()
    assert torch.allclose(back[:2], v.flatten()[:2], rtol=1e-3)
    narrow = quantise_v(torch.randn(1, 1, 4, 3), block_n=16, smooth=False, recipe=FP16)
    assert (narrow.scale == 1.0).all()


@pytest.mark.parametrize("recipe", [INT8, FP8, FP16], ids=["int8", "fp8", "fp16"])
@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-30, 3e4, 1e30])
def test_report_49_no_scale_is_zero_or_infinite(recipe, value):
    x = torch.full((1, 1, 20, 8), value)
    x[..., 0] = 0.0
    for found in (
        quantise_q(x, scale=1.0, recipe=recipe),
        quantise_k(x, block_n=16, smooth=True, recipe=recipe),
        quantise_v(x, block_n=16, smooth=True, recipe=recipe),
    ):
        assert (found.scale > 0).all()
        assert torch.isfinite(found.scale).all()
        assert torch.isfinite(found.values.float()).all()


def test_rounding_is_to_even_and_clamped():
    assert round_to(torch.tensor([0.5, 1.5, -2.5, 200.0]), torch.int8).tolist() == [0, 2, -2, 127]
    assert round_to(torch.tensor([1e9, -1e9, 17.0]), torch.float8_e4m3fn).float().tolist() == [
        448.0,
        -448.0,
        16.0,
    ]
    assert round_to(torch.tensor([1e9]), torch.float8_e4m3fnuz).float().item() == 240.0


@pytest.mark.parametrize(
    ("fp8", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e4m3fnuz, 240.0)], ids=str
)
def test_report_111_limits_follow_the_fp8_type(fp8, largest):
    recipe = Recipe(qk="fp8", pv="fp8", fp8=fp8)
    assert recipe.qk_max == recipe.fp8_max == largest
    assert math.isclose(2**recipe.p_offset, largest, rel_tol=1e-3)
    assert 2**recipe.p_offset <= largest
