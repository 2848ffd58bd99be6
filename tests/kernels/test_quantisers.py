"""The quantisers' torch twins: scales by hand, and bounds on what rounding may cost."""

from __future__ import annotations

import math

import pytest
import torch

from sage_plugin.kernels.contract import AttentionParams
from sage_plugin.kernels.quantize.emulation import (
    poisoned_keys,
    quantize_k,
    quantize_q,
    quantize_v,
    round_to,
)
from sage_plugin.kernels.quantize.hadamard import hadamard_matrix, rotated
from sage_plugin.kernels.quantize.recipe import LOG2E, Recipe
from tests.kernels.calls import Shape, draw, relative_l1
from tests.kernels.problems import run
from tests.matrix.definition import defined

INT8 = Recipe(qk="int8", pv="fp8")
FP8 = Recipe(qk="fp8", pv="fp8")
FP16 = Recipe(qk="int8", pv="fp16")


def test_q_has_one_scale_a_row_with_the_softmax_scale_folded_in():
    q = torch.tensor([[[[1.0, -2.0], [0.5, 0.25]]]])
    found = quantize_q(q, scale=0.5, recipe=INT8)
    assert found.values.tolist() == [[[[64, -127], [127, 64]]]]
    assert torch.allclose(found.scale, torch.tensor([[[2.0, 0.5]]]) * 0.5 * LOG2E / 127)


def test_k_loses_its_mean_and_has_one_scale_a_block():
    k = torch.tensor([[[[5.0], [7.0], [5.0], [4.0], [9.0]]]])
    found = quantize_k(k, block_n=2, smooth=True, recipe=INT8)
    assert found.mean.item() == 6.0
    assert found.values.shape == (1, 1, 3, 2, 1)
    assert found.values.flatten().tolist() == [-127, 127, -64, -127, 127, 0]
    assert torch.allclose(found.scale.flatten(), torch.tensor([1.0, 2.0, 3.0]) / 127)
    kept = quantize_k(k, block_n=2, smooth=False, recipe=INT8)
    assert kept.mean.item() == 0.0
    assert torch.allclose(kept.scale.flatten(), torch.tensor([7.0, 5.0, 9.0]) / 127)


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize(("recipe", "step"), [(INT8, 2**-4), (FP16, 2**-11)], ids=["fp8", "fp16"])
def test_v_comes_back_within_half_a_step(recipe, step, smooth):
    v = torch.randn(1, 2, 37, 8) * 5 + 20
    found = quantize_v(v, block_n=16, smooth=smooth, recipe=recipe)
    back = (
        found.values.float().reshape(1, 2, 48, 8) * found.scale[:, :, None] + found.mean[:, :, None]
    )
    error = (back[:, :, :37] - v).abs()
    span = (v - found.mean[:, :, None]).abs()
    floor = found.scale[:, :, None] * 2**-9
    assert (error <= span * step + floor + 1e-5).all()
    assert (found.values.float().reshape(1, 2, 48, 8)[:, :, 37:] == 0).all()


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("recipe", [INT8, FP16], ids=["fp8", "fp16"])
def test_what_the_output_is_owed_makes_good_the_mean_of_v(recipe, smooth):
    """Weights spread over all keys take the mean of V, and so carry the mean rounding error."""
    v = torch.randn(1, 2, 37, 8, generator=torch.Generator().manual_seed(0)) * 5 + 20
    found = quantize_v(v, block_n=16, smooth=smooth, recipe=recipe)
    mean = found.values.float().sum((2, 3)) / 37 * found.scale + found.owed
    limit = 1e-5 if recipe is INT8 else 2e-3
    assert (mean - v.mean(2)).abs().max() < limit


def test_wide_values_get_a_scale_in_fp16():
    v = torch.tensor([7e4, -3e6, 1.0]).view(1, 1, 3, 1)
    found = quantize_v(v, block_n=16, smooth=False, recipe=FP16)
    assert torch.isfinite(found.values.float()).all()
    back = found.values.float().flatten()[:3] * found.scale.item()
    assert torch.allclose(back[:2], v.flatten()[:2], rtol=1e-3)
    narrow = quantize_v(torch.randn(1, 1, 4, 3), block_n=16, smooth=False, recipe=FP16)
    assert (narrow.scale == 1.0).all()


@pytest.mark.parametrize("recipe", [INT8, FP8, FP16], ids=["int8", "fp8", "fp16"])
@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-30, 3e4, 1e30])
def test_report_49_no_scale_is_zero_or_infinite(recipe, value):
    x = torch.full((1, 1, 20, 8), value)
    x[..., 0] = 0.0
    for found in (
        quantize_q(x, scale=1.0, recipe=recipe),
        quantize_k(x, block_n=16, smooth=True, recipe=recipe),
        quantize_v(x, block_n=16, smooth=True, recipe=recipe),
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


@pytest.mark.parametrize("granule", [1, 2, 8])
def test_rows_of_a_granule_share_a_scale(granule):
    q = torch.randn(2, 2, 13, 8) * torch.arange(1, 14)[:, None]
    found = quantize_q(q, scale=0.5, recipe=INT8, granule=granule)
    for start in range(0, 13, granule):
        rows = slice(start, start + granule)
        expected = q[:, :, rows].abs().amax((2, 3)) * 0.5 * LOG2E / 127
        assert torch.allclose(found.scale[:, :, rows], expected[..., None].expand(-1, -1, 13)[
            ..., rows
        ])  # fmt: skip
    back = found.values.float() * found.scale[..., None]
    assert ((back - q * 0.5 * LOG2E).abs() <= found.scale[..., None] * 0.501).all()


def test_a_query_that_is_not_finite_has_no_scale_and_leaves_its_granule_alone():
    q = torch.randn(1, 1, 4, 8)
    q[0, 0, 1] = 0.0
    clean = quantize_q(q, scale=1.0, recipe=INT8, granule=4, hadamard=8)
    q[0, 0, 1, 3] = math.inf
    found = quantize_q(q, scale=1.0, recipe=INT8, granule=4, hadamard=8)
    assert found.scale.isnan().flatten().tolist() == [False, True, False, False]
    assert torch.equal(found.values, clean.values)
    assert torch.equal(found.scale[..., [0, 2, 3]], clean.scale[..., [0, 2, 3]])


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_the_rotation_is_orthonormal_and_in_natural_order(size):
    matrix = hadamard_matrix(size)
    assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    for i, j in [(0, 0), (size - 1, size - 1), (size // 2, size // 3)]:
        sign = -1.0 if bin(i & j).count("1") % 2 else 1.0
        assert math.isclose(matrix[i, j], sign / math.sqrt(size))


@pytest.mark.parametrize("block", [0, 16, 32])
def test_products_of_rotated_rows_are_those_of_the_rows(block):
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, rows, 96, generator=generator) for rows in (5, 7))
    found = rotated(q, block) @ rotated(k, block).transpose(-1, -2)
    assert torch.allclose(found, q @ k.transpose(-1, -2), atol=1e-4)
    # Blocks are alone; a matrix product of another width may add in another order.
    torch.testing.assert_close(
        rotated(q, block)[..., :64], rotated(q[..., :64], block), rtol=0, atol=1e-6
    )
    if block:
        assert not torch.allclose(rotated(q, block), q)


@pytest.mark.parametrize("kernel", ["sage", "fav3_sage"])
def test_report_64_rotation_halves_the_error_of_outlying_channels(kernel):
    q, k, v = draw(Shape(1, 2, 2, 120, 200, 64))
    k = torch.randn(k.shape, generator=torch.Generator().manual_seed(4))
    k[..., [5, 41]] *= 40.0
    q[..., [5, 41]] *= 0.05  # so that softmax does not see these two channels alone
    problem = AttentionParams(0.125, False, "bhsd")
    expected, expected_lse = defined(q, k, v, problem)
    rough, rough_lse = run(kernel, q, k, v, problem)
    turned, turned_lse = run(kernel, q, k, v, problem, hadamard=64)
    error = (turned_lse - expected_lse).abs().mean()
    assert error <= 0.5 * (rough_lse - expected_lse).abs().mean()
    if kernel == "sage":  # FP8 V has errors of its own
        assert relative_l1(turned, expected) <= 0.5 * relative_l1(rough, expected)


ALIVE = torch.tensor([True, False, True, True, False, True]).view(1, 1, 6)


@pytest.mark.parametrize("hidden", [0.0, 1e30, math.nan, math.inf])
def test_keys_that_nobody_sees_are_zeros_and_part_of_no_statistic(hidden):
    x = torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(0)) + 5
    seen = x[:, :, ALIVE[0, 0]]
    x[:, :, ~ALIVE[0, 0]] = hidden
    k = quantize_k(x, block_n=16, smooth=True, recipe=INT8, alive=ALIVE)
    v = quantize_v(x, block_n=16, smooth=True, recipe=INT8, alive=ALIVE)
    mean = seen.mean(2)
    assert torch.allclose(k.mean, mean, atol=1e-6)
    assert torch.allclose(v.mean, mean, atol=1e-6)
    centered = (seen - mean[:, :, None]).abs()
    assert torch.allclose(k.scale[..., 0], centered.amax((2, 3)) / 127, rtol=1e-5)
    assert torch.allclose(v.scale, centered.amax(2) / 448, rtol=1e-5)
    for found in (k, v):
        assert (found.values.float()[:, :, 0, [1, 4]] == 0).all()
        assert torch.isfinite(found.values.float()).all()
    nobody = torch.zeros_like(ALIVE)
    for found in (
        quantize_k(x, block_n=16, smooth=True, recipe=INT8, alive=nobody),
        quantize_v(x, block_n=16, smooth=True, recipe=INT8, alive=nobody),
    ):
        assert (found.mean == 0).all()
        assert (found.values.float() == 0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_left_out_and_their_rows_are_zeros(value):
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]]).view(1, 1, 3, 2)
    k, v = x.clone(), x.clone()
    k[0, 0, 1, 0] = value
    poison = poisoned_keys(k, v)
    assert poison.tolist() == poisoned_keys(v, k).tolist() == [[[False, True, False]]]
    found = quantize_k(k, block_n=16, smooth=True, recipe=INT8, poison=poison)
    assert torch.allclose(found.mean, torch.tensor([[[6.0 / 3, 15.0 / 3]]]))
    assert (found.values[0, 0, 0, 1] == 0).all()
    assert torch.isclose(found.scale.squeeze(), torch.tensor(4.0 / 127))
    values = quantize_v(k, block_n=16, smooth=False, recipe=INT8, poison=poison)
    assert torch.allclose(values.scale * 448, torch.tensor([[[5.0, 9.0]]]))
    assert (values.values.float()[0, 0, 0, 1] == 0).all()


def test_a_bad_key_that_nobody_sees_is_no_poison():
    k = torch.full((1, 2, 6, 8), math.nan)
    assert torch.equal(poisoned_keys(k, k, ALIVE)[0, 1], ALIVE[0, 0])
