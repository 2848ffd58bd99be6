"""The linear exponential: its values, which keys go by it, and what it does to attention."""

from __future__ import annotations

import math

import pytest
import torch

import sage_plugin
from sage_plugin.kernels.attention.backends.emulation import linear_exponential
from sage_plugin.kernels.attention.backends.emulation.linear_exponential import (
    linear_exp2,
    linear_keys,
    linear_weights,
)
from sage_plugin.kernels.attention.backends.emulation.online_softmax import (
    blockwise,
    rounded_weights,
)
from sage_plugin.kernels.attention.oracle import oracle
from sage_plugin.kernels.contract import AttentionParams
from sage_plugin.kernels.quantize.recipe import LINEAR_SHIFT
from tests.kernels.calls import FP8_WEIGHTS, Shape, draw, hopper_launch, relative_l1

E4M3 = torch.float8_e4m3fn
PLAIN = AttentionParams(0.125, False, "bhsd")
CAUSAL = AttentionParams(0.125, True, "bhsd")


def e4m3(bits: int) -> float:
    """The number of some bits, by the definition of the format."""
    exponent, mantissa = bits >> 3, bits & 7
    if exponent == 0:
        return mantissa / 8 * 2.0**-6
    return (1 + mantissa / 8) * 2.0 ** (exponent - 7)


@pytest.mark.parametrize("bits", [1, 7, 8, 9, 55, 56, 57, 63, 64, 119, 120, 125, 126])
def test_each_number_has_its_eighth_of_an_octave(bits):
    """Bits b are the answer from (b - 1/2 - 56 + shift)/8 up to an eighth more."""
    last = (bits + 0.5 - 56 + LINEAR_SHIFT) / 8
    inside = torch.tensor([last - 0.124, last - 0.06, last - 0.001])
    assert linear_exp2(inside).tolist() == [e4m3(bits)] * 3
    below = linear_exp2(torch.tensor([last - 0.126]))
    assert below.item() == e4m3(bits - 1)


def test_every_number_up_to_448_is_reached_in_order():
    x = (torch.arange(127) - 56 + LINEAR_SHIFT) / 8
    assert linear_exp2(x).tolist() == [e4m3(bits) for bits in range(127)]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-6, -5), (7, 8), (-6, 8)])
def test_the_mean_error_is_nothing_and_its_spread_is_three_per_cent(low, high):
    x = torch.linspace(low, high, 100_001, dtype=torch.float64)[:-1]
    error = linear_exp2(x.float()).double() / torch.exp2(x) - 1
    assert abs(error.mean().item()) < 1e-3
    spread = error.square().mean().sqrt().item()
    assert 0.031 <= spread <= 0.032
    assert error.abs().max() < 0.08
    rounded = torch.exp2(x).to(E4M3).double() / torch.exp2(x) - 1
    assert spread > 1.15 * rounded.square().mean().sqrt().item()


def test_what_is_out_of_range_is_clamped():
    x = torch.tensor([8.8, 9.0, 100.0, math.inf, -7.2, -100.0, -1e30, -math.inf, math.nan])
    assert linear_exp2(x).tolist() == [448.0] * 4 + [0.0] * 5


def test_the_shape_and_the_type_are_those_of_fp32_weights():
    out = linear_exp2(torch.zeros(2, 3, 4))
    assert (out.shape, out.dtype) == ((2, 3, 4), torch.float32)
    assert torch.equal(out, torch.ones(2, 3, 4))


@pytest.mark.parametrize(
    ("block_n", "eighths", "keys"),
    [
        *((128, 0, 0), (128, 1, 16), (128, 3, 48), (128, 4, 64), (128, 6, 96)),
        *((64, 0, 0), (64, 2, 16), (64, 4, 32), (64, 6, 48)),
    ],
)
def test_how_many_keys_of_a_block_are_linear(block_n, eighths, keys):
    assert linear_keys(block_n, eighths) == keys


# -- which keys and blocks --------------------------------------------------------------------


def linear_at(problem, config, *, seq_q, seq_k, groups=1):
    """Bool (rows, keys): the weights that are those of the linear rule."""
    weigh = linear_weights(problem, config, E4M3, seq_q=seq_q, seq_k=seq_k)
    blocks = -(-seq_k // config.block_n)
    generator = torch.Generator().manual_seed(0)
    found = []
    for block in range(blocks):
        # 1.07 times a power of two, where the rules differ: the linear one gives that power.
        octaves = torch.randint(-5, 8, (1, 1, groups * seq_q, config.block_n), generator=generator)
        x = octaves + 0.1 + 0.001 * torch.rand(octaves.shape, generator=generator)
        exact, summed = rounded_weights(E4M3)(x, block)
        assert torch.equal(summed, torch.exp2(x))
        p, sums = weigh(x, block)
        assert torch.equal(p, sums)
        linear = linear_exp2(x)
        assert ((p == exact) | (p == linear)).all()
        assert (exact != linear).all()
        found.append((p == linear)[0, 0])
    return torch.cat(found, 1)


def expected_at(config, *, seq_q, seq_k, causal):
    """The same by counting: the last keys of blocks that every row of a program sees."""
    keys = -(-seq_k // config.block_n) * config.block_n
    expected = torch.zeros(seq_q, keys, dtype=torch.bool)
    for row in range(seq_q):
        first = row - row % config.block_m
        program = range(first, min(first + config.block_m, seq_q))
        for start in range(0, keys, config.block_n):
            block = range(start, start + config.block_n)
            sees = all(k < seq_k for k in block) and all(
                not causal or k <= r + seq_k - seq_q for r in program for k in (block[-1],)
            )
            if sees:
                last = linear_keys(config.block_n, config.exp_linear)
                expected[row, start + config.block_n - last : start + config.block_n] = True
    return expected


@pytest.mark.parametrize("eighths", [2, 4, 6])
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("seq_k", [64, 127, 128, 300])
def test_the_last_keys_of_whole_blocks_are_linear(eighths, block_n, seq_k):
    config = hopper_launch(192, block_n, exp_linear=eighths)
    found = linear_at(PLAIN, config, seq_q=3, seq_k=seq_k)
    assert torch.equal(found, expected_at(config, seq_q=3, seq_k=seq_k, causal=False))


@pytest.mark.parametrize("block_m", [128, 192])
@pytest.mark.parametrize(
    ("seq_q", "seq_k"), [(400, 400), (400, 600), (600, 300), (129, 257), (1, 256), (193, 128)]
)
def test_in_causal_calls_a_block_is_linear_where_a_whole_program_sees_it(block_m, seq_q, seq_k):
    config = hopper_launch(block_m, 64, exp_linear=4)
    found = linear_at(CAUSAL, config, seq_q=seq_q, seq_k=seq_k)
    expected = expected_at(config, seq_q=seq_q, seq_k=seq_k, causal=True)
    assert torch.equal(found, expected)


def test_heads_of_a_group_start_anew():
    config = hopper_launch(128, 64, exp_linear=4)
    found = linear_at(CAUSAL, config, seq_q=150, seq_k=200, groups=3)
    expected = expected_at(config, seq_q=150, seq_k=200, causal=True)
    assert expected.any()
    assert torch.equal(found, expected.repeat(3, 1))


def test_a_masked_call_has_no_linear_weights_and_none_at_zero_eighths():
    mask = torch.ones(1, 1, 1, 256, dtype=torch.bool)
    masked = AttentionParams(0.125, False, "bhsd", mask=mask)
    assert not linear_at(masked, hopper_launch(exp_linear=4), seq_q=4, seq_k=256).any()
    assert not linear_at(PLAIN, hopper_launch(exp_linear=0), seq_q=4, seq_k=256).any()
    assert linear_at(PLAIN, hopper_launch(exp_linear=4), seq_q=4, seq_k=256).any()


def test_row_sums_are_of_the_weights_that_multiply():
    """Of equal values the mean is that value to the last digit, whatever rounding took."""
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(4, 1, 1, 50, 128, generator=generator)
    values = torch.full((1, 1, 128, 8), 5.0)
    offset = math.log2(448) - 1e-4
    outs = {}
    for name, weigh in (
        ("own", linear_weights(PLAIN, hopper_launch(exp_linear=4), E4M3, seq_q=50, seq_k=512)),
        ("exact", rounded_weights(E4M3)),
    ):
        sums = blockwise(
            lambda j: scores[j], lambda _: values, blocks=4, weigh=weigh, p_offset=offset
        )
        outs[name] = (sums.mean() - 5.0).abs().max().item()
    assert outs["own"] < 1e-5
    assert outs["exact"] > 1e-3


# -- in the emulation -------------------------------------------------------------------------


def emulated(kernel, q, k, v, *, exp_linear, block_m=192, block_n=128, **options):
    config = hopper_launch(block_m, block_n, exp_linear=exp_linear)
    return sage_plugin.attention(
        q, k, v, kernel=kernel, variant="emulation", launch=config, out_dtype=torch.float32,
        return_lse=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("kernel", FP8_WEIGHTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_four_eighths_add_less_than_a_tenth_to_the_error(kernel, causal, dim):
    q, k, v = draw(Shape(1, 2, 1, 512, 1024, dim))
    exact, exact_lse = oracle(q, k, v, is_causal=causal)
    outs = {
        eighths: emulated(kernel, q, k, v, exp_linear=eighths, is_causal=causal)
        for eighths in (0, 4, 6)
    }
    errors = {eighths: relative_l1(out, exact) for eighths, (out, _) in outs.items()}
    assert errors[0] < errors[4] < 1.1 * errors[0]
    assert errors[4] < errors[6] < 1.2 * errors[0]
    assert not torch.equal(outs[0][0], outs[4][0])
    assert not torch.equal(outs[4][0], outs[6][0])
    for _, lse in outs.values():
        assert (lse - exact_lse).abs().max() < 0.05


@pytest.mark.parametrize("kernel", FP8_WEIGHTS)
def test_calls_without_a_whole_block_are_exact_whatever_the_eighths(kernel):
    q, k, v = draw(Shape(1, 1, 1, 40, 100, 64))
    four, six = (emulated(kernel, q, k, v, exp_linear=e)[0] for e in (4, 6))
    assert torch.equal(four, six)
    mask = torch.zeros(1, 1, 1, 300)
    q, k, v = draw(Shape(1, 1, 1, 40, 300, 64))
    four, six = (emulated(kernel, q, k, v, exp_linear=e, attn_mask=mask)[0] for e in (4, 6))
    assert torch.equal(four, six)
    four, six = (emulated(kernel, q, k, v, exp_linear=e)[0] for e in (4, 6))
    assert not torch.equal(four, six)


@pytest.mark.parametrize("kernel", FP8_WEIGHTS)
@pytest.mark.parametrize("block_m", [128, 192])
def test_rows_before_the_first_whole_block_have_exact_weights(kernel, block_m):
    """A causal program of block_m rows is linear from the first block that its first row ends."""
    q, k, v = draw(Shape(1, 1, 1, 400, 400, 64))
    four, six = (
        emulated(kernel, q, k, v, exp_linear=e, block_m=block_m, is_causal=True)[0] for e in (4, 6)
    )
    same = (four == six).all(-1)[0, 0]
    assert same[:block_m].all()
    assert same[block_m:].double().mean() < 0.05


@pytest.mark.parametrize("kernel", FP8_WEIGHTS)
@pytest.mark.parametrize("key", [0, 60, 127, 200, 299])
@pytest.mark.parametrize("which", [1, 2], ids=["k", "v"])
def test_a_nan_of_a_linear_key_is_seen(kernel, key, which):
    tensors = list(draw(Shape(1, 1, 1, 300, 300, 64)))
    tensors[which][0, 0, key, 3] = math.nan
    out, _ = emulated(kernel, *tensors, exp_linear=6, is_causal=True)
    assert torch.equal(out.isnan().any(-1)[0, 0], torch.arange(300) >= key)


def test_equal_values_come_out_as_they_are():
    """Row sums take part in the rounding: with exact ones the mean of V would move."""
    q, k, _ = draw(Shape(1, 1, 1, 64, 512, 64))
    v = torch.full_like(k, 7.0)
    config = hopper_launch(exp_linear=4, smooth_v=False)
    out = sage_plugin.attention(q, k, v, kernel="fav3_sage", variant="emulation", launch=config)
    assert (out - 7.0).abs().max() < 1e-4
    config = hopper_launch(exp_linear=0, smooth_v=False)
    out = sage_plugin.attention(q, k, v, kernel="fav3_sage", variant="emulation", launch=config)
    assert (out - 7.0).abs().max() > 1e-3


def test_the_gluon_code_has_the_constants_of_the_emulation():
    pytest.importorskip("triton")
    weights = pytest.importorskip("sage_plugin.kernels.attention.backends.hopper.softmax")
    start = float(getattr(weights.LINEAR_START, "value", weights.LINEAR_START))
    bits_of_one = linear_exponential._BITS_OF_ONE
    assert start == pytest.approx(1 - (bits_of_one - LINEAR_SHIFT - 0.5) / 256, abs=1e-9)
