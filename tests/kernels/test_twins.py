"""Every torch twin against attention written out in fp64, on problems of every kind."""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams, Packed
from tests.kernels.calls import EMULATED, LIMITS, QUANTIZED, Shape, draw, launch, relative_l1
from tests.kernels.problems import MASKS, mask_of, problems, run
from tests.kernels.written_out import seen_by, written_out

HOSTS = ("torch", "sdpa")
LIMIT = {**LIMITS, "torch": 1e-5, "sdpa": 1e-5, "fav2": 1e-5}
LSE_LIMIT = {"torch": 1e-5, "sdpa": 1e-5, "fav2": 1e-5, "sage": 0.15, "fav3_sage": 0.15}


def check(kernel, q, k, v, problem, *, limit=1.0, **fields):
    """Output and LSE within the kernel's limit, and the dead rows exactly as the contract has."""
    out, lse = run(kernel, q, k, v, problem, **fields)
    expected, expected_lse = written_out(q, k, v, problem)
    seen = seen_by(problem, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    dead = ~seen.any(-1)
    assert (out[dead] == 0).all()
    sink = problem.sinks
    at_dead = torch.full_like(lse, -math.inf) if sink is None else sink[:, None].expand_as(lse)
    assert torch.allclose(lse[dead], at_dead[dead].float(), rtol=1e-6)
    if not dead.all():
        # The floor keeps calls of a few keys, whose outputs may nearly cancel, from being judged.
        error = (out - expected).abs().mean() / (expected.abs().mean() + 0.3 * v.float().std())
        assert error < limit * LIMIT[kernel]
        assert (lse - expected_lse)[~dead].abs().max() < limit * LSE_LIMIT.get(kernel, 0.3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(made=problems(), kernel=st.sampled_from(HOSTS))
def test_the_host_and_the_oracle_are_exact(made, kernel):
    shape, problem = made
    check(kernel, *draw(shape), problem)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    made=problems(),
    kernel=st.sampled_from(EMULATED),
    block_n=st.sampled_from([16, 32, 64]),
    smooth=st.booleans(),
)
def test_emulations_are_within_their_limits(made, kernel, block_n, smooth):
    shape, problem = made
    q, k, v = draw(shape)
    # K has a bias of each channel; without smoothing its scale is coarser by as much.
    check(kernel, q, k, v, problem, limit=2.0 if smooth else 6.0, block_n=block_n,
          smooth_k=smooth, smooth_v=smooth)  # fmt: skip


@pytest.mark.parametrize("kernel", [*HOSTS, *EMULATED])
@pytest.mark.parametrize("kind", MASKS[1:])
def test_report_35_masks_of_every_form(kernel, kind):
    shape = Shape(2, 4, 2, 33, 70, 64)
    problem = AttentionParams(0.125, False, "bhsd", mask_of(kind, shape))
    check(kernel, *draw(shape), problem)


@pytest.mark.parametrize("kernel", [*HOSTS, *EMULATED])
def test_report_41_causal_and_padding_hold_together(kernel):
    shape = Shape(2, 4, 2, 40, 70, 64)
    padding = torch.ones(2, 1, 1, 70, dtype=torch.bool)
    padding[1, ..., :35] = False  # left padding, past the diagonal of the first rows
    problem = AttentionParams(0.125, True, "bhsd", padding)
    q, k, v = draw(shape)
    check(kernel, q, k, v, problem)
    out, lse = run(kernel, q, k, v, problem)
    assert (out[1, :, :5] == 0).all()
    assert torch.isneginf(lse[1, :, :5]).all()
    assert torch.isfinite(lse[1, :, 5:]).all()


@pytest.mark.parametrize("kernel", [*HOSTS, *EMULATED])
def test_report_34_padded_sequences_equal_the_ones_alone(kernel):
    q, k, v = draw(Shape(2, 2, 2, 16, 16, 64))
    padding = torch.ones(2, 1, 1, 16, dtype=torch.bool)
    padding[0, ..., :9] = False
    out, lse = run(kernel, q, k, v, AttentionParams(0.125, True, "bhsd", padding))
    alone, alone_lse = run(
        kernel, q[:1, :, 9:], k[:1, :, 9:], v[:1, :, 9:], AttentionParams(0.125, True, "bhsd")
    )
    assert relative_l1(out[:1, :, 9:], alone) < LIMIT[kernel]
    assert (lse[:1, :, 9:] - alone_lse).abs().max() < 0.05


@pytest.mark.parametrize("kernel", [*HOSTS, *EMULATED])
def test_report_32_a_hidden_value_is_not_in_the_output(kernel):
    q, k, v = draw(Shape(1, 2, 2, 20, 50, 64))
    v[:, :, -1] = 1e3
    mask = torch.ones(1, 1, 1, 50, dtype=torch.bool)
    mask[..., -1] = False
    problem = AttentionParams(0.125, False, "bhsd", mask)
    check(kernel, q, k, v, problem)
    assert run(kernel, q, k, v, problem)[0].abs().max() < 5


@pytest.mark.parametrize("kernel", [*HOSTS, *EMULATED])
def test_report_36_additive_bias_is_in_natural_log_units(kernel):
    q, k, v = draw(Shape(1, 2, 2, 30, 60, 64))
    bias = torch.zeros(1, 1, 1, 60)
    bias[..., ::2] = -2.0
    v[:, :, ::2] += 4.0
    problem = AttentionParams(0.125, False, "bhsd", bias)
    check(kernel, q, k, v, problem)
    constant = AttentionParams(0.125, False, "bhsd", torch.full((1, 1, 1, 60), -2.0))
    plain = run(kernel, q, k, v, AttentionParams(0.125, False, "bhsd"))[1]
    assert torch.allclose(run(kernel, q, k, v, constant)[1], plain - 2.0, atol=1e-4)


@pytest.mark.parametrize("kernel", [*HOSTS, *EMULATED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_report_37_39_large_and_infinite_biases(kernel, dtype):
    shape = Shape(1, 2, 2, 6, 160, 64)
    bias = torch.zeros(1, 1, 6, 160)
    bias[:, :, 0] = -math.inf
    bias[:, :, 1] = torch.finfo(dtype).min
    bias[:, :, 2] = -1e4
    bias[:, :, 3, :128] = -math.inf
    bias[:, :, 4, :128] = torch.finfo(dtype).min
    bias[:, :, 4, 128:] = -3e4
    problem = AttentionParams(0.125, False, "bhsd", bias.to(dtype))
    q, k, v = draw(shape)
    out, lse = run(kernel, q, k, v, problem)
    assert torch.isfinite(out).all()
    dead = [0] if dtype == torch.float16 else [0, 1]
    assert (out[:, :, dead] == 0).all()
    assert torch.isneginf(lse[:, :, dead]).all()
    # A score loses its digits beside -1e4; what is left is an average of the keys that are seen.
    expected, expected_lse = written_out(q, k, v, problem)
    assert relative_l1(out[:, :, 3:4], expected[:, :, 3:4]) < 2 * LIMIT[kernel]
    assert (out[:, :, 2:] - expected[:, :, 2:]).abs().max() < 0.25
    assert torch.allclose(lse[:, :, 2:], expected_lse[:, :, 2:].float(), rtol=1e-4, atol=0.1)


@pytest.mark.parametrize("kernel", [*HOSTS, *EMULATED])
def test_a_finite_value_just_above_the_threshold_is_still_a_bias(kernel):
    q, k, v = draw(Shape(1, 1, 1, 3, 20, 64))
    bias = torch.full((1, 1, 1, 20), -0.9e38)
    bias[..., 5:] = -1.1e38
    out, lse = run(kernel, q, k, v, AttentionParams(0.0, False, "bhsd", bias))
    assert relative_l1(out, v[:, :, :5].mean(2, keepdim=True).expand_as(out)) < LIMIT[kernel]
    assert torch.allclose(lse, torch.full_like(lse, -0.9e38), rtol=1e-5)


@pytest.mark.parametrize("kernel", [*HOSTS, *EMULATED])
@pytest.mark.parametrize("window", [(4, -1), (5, 3), (-1, 2), (0, 0), (200, 200)], ids=str)
@pytest.mark.parametrize("lengths", [(40, 70), (70, 40), (1, 50)], ids=str)
def test_windows(kernel, window, lengths):
    q, k, v = draw(Shape(1, 2, 1, *lengths, 64))
    for causal in (False, True):
        check(kernel, q, k, v, AttentionParams(0.125, causal, "bhsd", None, window), limit=2)


@pytest.mark.parametrize("kernel", [*HOSTS, *EMULATED])
@pytest.mark.parametrize("smooth", [False, True])
def test_report_54_softcap_with_a_mean_of_k(kernel, smooth):
    q, k, v = draw(Shape(1, 4, 2, 40, 70, 64))
    k = k * 0.1 + 50.0
    problem = AttentionParams(0.125, True, "bhsd", softcap=20.0)
    expected, expected_lse = written_out(q, k, v, problem)
    out, lse = run(kernel, q, k, v, problem, smooth_k=smooth)
    assert torch.isfinite(out).all()
    coarse = {"sage": 1.0, "fav3_sage": 1.0, "fav3_fp8": 4.0}  # K's scale holds its mean
    assert (lse - expected_lse).abs().max() < (0.01 if smooth else coarse.get(kernel, 0.01))
    if smooth:
        assert relative_l1(out, expected) < 2 * LIMIT[kernel]
    huge, _ = run(kernel, q, k, v, dataclasses.replace(problem, softcap=0.5))
    assert torch.isfinite(huge).all()  # scores are 100 times the cap


@pytest.mark.parametrize("kernel", [*HOSTS, *EMULATED])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("level", [-math.inf, -5.0, 3.0, 90.0])
def test_sinks_are_weighed_against_true_scores(kernel, smooth, level):
    q, k, v = draw(Shape(1, 4, 2, 40, 70, 64))
    q, k = q + 0.05, k + 1.0
    problem = AttentionParams(0.125, False, "bhsd", sinks=level + torch.arange(4.0))
    check(kernel, q, k, v, problem, limit=2.5, smooth_k=smooth, smooth_v=smooth)


@pytest.mark.parametrize("kernel", QUANTIZED)
def test_a_sink_takes_weight_from_the_mean_of_v(kernel):
    q, k, v = draw(Shape(1, 1, 1, 10, 40, 64))
    v = v * 0.01 + 100.0
    problem = AttentionParams(0.0, False, "bhsd", sinks=torch.tensor([math.log(40.0)]))
    out, lse = run(kernel, q, k, v, problem, smooth_v=True)
    assert torch.allclose(out, torch.full_like(out, 50.0), rtol=1e-3)
    assert torch.allclose(lse, torch.full_like(lse, math.log(80.0)), atol=1e-4)


def packed_of(ends_q, ends_k):
    longest = [max(b - a for a, b in itertools.pairwise(e)) for e in (ends_q, ends_k)]
    tensors = [torch.tensor(e, dtype=torch.int32) for e in (ends_q, ends_k)]
    return Packed(*tensors, *longest)


@pytest.mark.parametrize("kernel", [*HOSTS, *EMULATED])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "ends_k", [[0, 5, 133, 134], [0, 40, 60, 61], [0, 0, 30, 90]], ids=["self", "cross", "none"]
)
def test_report_28_packed_sequences_equal_calls_of_each(kernel, causal, ends_k):
    ends_q = [0, 5, 133, 134]
    q = draw(Shape(1, 4, 2, ends_q[-1], 1, 64), layout="bshd")[0]
    _, k, v = draw(Shape(1, 4, 2, 1, ends_k[-1], 64), layout="bshd")
    k[:, : ends_k[2]] += 20.0  # a mean for each sequence
    problem = AttentionParams(
        0.125, causal, "bshd", None, (60, -1), 30.0, torch.arange(4.0), packed_of(ends_q, ends_k)
    )
    out, lse = run(kernel, q, k, v, problem, smooth_k=True, smooth_v=True)
    assert lse.shape == (1, 4, 134)
    alone = dataclasses.replace(problem, packed=None)
    for i in range(3):
        rows, keys = slice(*ends_q[i : i + 2]), slice(*ends_k[i : i + 2])
        if keys.start == keys.stop:
            assert (out[:, rows] == 0).all()
            assert torch.allclose(lse[:, :, rows], torch.arange(4.0)[:, None].expand(4, 5))
            continue
        expected, expected_lse = run(
            kernel, q[:, rows], k[:, keys], v[:, keys], alone, smooth_k=True, smooth_v=True
        )
        assert torch.allclose(out[:, rows], expected, atol=1e-6)
        assert torch.allclose(lse[:, :, rows], expected_lse, atol=1e-6)


@pytest.mark.parametrize("kernel", [*HOSTS, *EMULATED])
def test_rows_and_keys_of_no_sequence_are_not_read(kernel):
    ends = [0, 7, 20]
    q, k, v = (x.transpose(1, 2) for x in draw(Shape(1, 2, 2, 30, 30, 64)))
    problem = AttentionParams(0.125, False, "bshd", packed=packed_of(ends, ends))
    expected, _ = run(kernel, q, k, v, problem)
    q, k, v = (torch.cat([x[:, :20], torch.full_like(x[:, 20:], math.nan)], 1) for x in (q, k, v))
    out, _ = run(kernel, q, k, v, problem)
    assert torch.equal(out[:, :20], expected[:, :20])


@pytest.mark.parametrize("kernel", EMULATED)
def test_report_67_two_halves_of_k_merge_to_the_whole_under_a_mask(kernel):
    shape = Shape(1, 4, 2, 50, 90, 64)
    q, k, v = draw(shape)
    k = k + 50.0
    mask = mask_of("dead_rows", shape)
    whole, lse = run(kernel, q, k, v, AttentionParams(0.125, False, "bhsd", mask))
    halves = [
        run(
            kernel,
            q,
            k[:, :, part],
            v[:, :, part],
            AttentionParams(0.125, False, "bhsd", mask[..., part]),
        )
        for part in (slice(0, 40), slice(40, 90))
    ]
    total = torch.logaddexp(halves[0][1], halves[1][1])
    weights = [torch.exp(part - total).nan_to_num(0.0)[..., None] for _, part in halves]
    merged = sum(out * weight for (out, _), weight in zip(halves, weights, strict=True))
    assert relative_l1(merged, whole) < 2 * LIMITS[kernel]
    dead = torch.isneginf(lse)
    assert dead.any()
    assert torch.equal(torch.isneginf(total), dead)
    assert (total - lse)[~dead].abs().max() < 0.1


@pytest.mark.parametrize("kernel", QUANTIZED)
@pytest.mark.parametrize("packed", [False, True])
def test_operands_do_not_keep_the_inputs_alive(kernel, packed):
    q, k, v = draw(Shape(1, 2, 2, 20, 20, 64), torch.float16, layout="bshd")
    bounds = packed_of([0, 7, 20], [0, 7, 20]) if packed else None
    built = implementation(kernel, "emulation")
    problem = AttentionParams(0.125, True, "bshd", packed=bounds)
    operands = built.prepare(q, k, v, problem=problem, launch=launch())
    out, lse = built.launch(operands, return_lse=True)
    storages = [weakref.ref(x.untyped_storage()) for x in (q, k, v)]
    alive = [weakref.ref(x) for x in (q, k, v)]
    del q, k, v
    assert all(ref() is None for ref in (*alive, *storages))
    again, lse_again = built.launch(operands, return_lse=True)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
