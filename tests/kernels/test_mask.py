"""Masks, window, soft cap and sinks through `attention()`: honoured by every kernel, or refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention.api import attention
from sage_plugin.kernels.attention.mask import mask_kind, normalized
from tests.kernels.calls import EMULATED, LIMITS, Shape, draw, relative_l1
from tests.kernels.written_out import naive

EVERY = (*EMULATED, "torch", "sdpa", "auto")
GROUPED = Shape(2, 4, 2, 33, 70, 64)
FORMS = ((33, 70), (2, 1, 1, 70), (2, 1, 33, 70), (2, 4, 33, 70), (1, 4, 1, 70), (70,), (4, 33, 1))


@pytest.fixture(autouse=True)
def _alone(unconfigured):
    """No environment, no user's configs."""


def limit(kernel):
    return 3 * LIMITS.get(kernel, 1e-5)


def bool_mask(shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator) > 0.4


def compared(kernel, tensors, mask=None, **options):
    """Output and LSE of a kernel, after they were held against fp64."""
    named = {"causal" if n == "is_causal" else n: x for n, x in options.items()}
    expected, expected_lse = naive(*tensors, mask, **named)
    out, lse = attention(*tensors, mask, kernel=kernel, return_lse=True, **options)
    assert relative_l1(out, expected) < limit(kernel), kernel
    alive = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), alive)
    off = (lse - expected_lse)[alive].abs() / expected_lse[alive].abs().clamp_min(1.0)
    spread = max(1.0, 8 * abs(options.get("scale", 0.0)))  # the error grows with the scores
    assert off.max() < (0.1 * spread if kernel in EMULATED else 1e-5)
    alone = attention(*tensors, mask, kernel=kernel, **options)
    close = {"rtol": 0, "atol": 0} if kernel in EMULATED else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(alone, out, **close)
    return out, lse


# -- masks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_report_35_masks_of_every_shape_that_broadcasts(kernel, form):
    compared(kernel, draw(GROUPED), bool_mask(form))
    compared(kernel, draw(GROUPED), torch.randn(form))


@pytest.mark.parametrize("kernel", EVERY)
def test_report_35_an_expanded_mask_is_what_it_is_expanded_from(kernel):
    tensors = draw(GROUPED)
    for mask in (bool_mask((2, 1, 1, 70)), bool_mask((1, 1, 33, 70)), bool_mask((1, 4, 33, 1))):
        full = mask.expand(2, 4, 33, 70)
        assert 0 in full.stride()
        out = attention(*tensors, full, kernel=kernel)
        assert relative_l1(out, naive(*tensors, mask)[0]) < limit(kernel)
        if kernel in EMULATED:
            assert torch.equal(out, attention(*tensors, mask, kernel=kernel))


def test_report_35_an_expanded_mask_shrinks_and_is_never_copied():
    mask = bool_mask((2, 1, 1, 70))
    kept = normalized(mask.expand(2, 4, 33, 70), batch=2, heads_q=4, seq_q=33, seq_k=70)
    assert kept.shape == (2, 1, 1, 70)
    assert kept.data_ptr() == mask.data_ptr()
    assert mask_kind(kept) == "key_bias"
    dense = normalized(bool_mask((33, 70)), batch=2, heads_q=4, seq_q=33, seq_k=70)
    assert (dense.shape, mask_kind(dense)) == ((1, 1, 33, 70), "dense")
    assert mask_kind(None) == "none"


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_report_35_the_mask_is_by_heads_and_rows_in_either_layout(kernel, layout):
    shape = Shape(1, 4, 4, 6, 9, 64)
    mask = bool_mask((1, 4, 6, 9)) | (torch.arange(9) == 2)
    expected, _ = naive(*draw(shape), mask)
    tensors = draw(shape, layout=layout)
    out = attention(*tensors, mask, kernel=kernel, layout=layout)
    assert relative_l1(out if layout == "bhsd" else out.transpose(1, 2), expected) < limit(kernel)


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize("form", [(70,), (2, 1, 1, 70), (33, 70)], ids=str)
def test_report_32_a_hidden_key_has_no_part_in_the_output(kernel, form):
    q, k, v = draw(GROUPED)
    v[:, :, -1] = 1e3
    mask = torch.ones(form, dtype=torch.bool)
    mask[..., -1] = False
    without = naive(q, k[:, :, :-1], v[:, :, :-1])[0]
    assert relative_l1(attention(q, k, v, mask, kernel=kernel), without) < limit(kernel)
    floats = torch.zeros(form).masked_fill(~mask, -math.inf)
    assert relative_l1(attention(q, k, v, floats, kernel=kernel), without) < limit(kernel)


@pytest.mark.parametrize("kernel", EVERY)
def test_report_34_left_padded_sequences_equal_calls_of_their_own(kernel):
    q, k, v = draw(Shape(2, 4, 2, 16, 16, 64))
    lengths = (16, 5)
    mask = torch.stack([torch.arange(16) >= 16 - n for n in lengths])[:, None, None]
    out = attention(q, k, v, mask, is_causal=True, kernel=kernel)
    for item, length in enumerate(lengths):
        own = [x[item : item + 1, :, -length:] for x in (q, k, v)]
        expected = naive(*own, causal=True)[0]
        assert relative_l1(out[item : item + 1, :, -length:], expected) < limit(kernel)
    assert (out[1, :, : 16 - lengths[1]] == 0).all()


@pytest.mark.parametrize("kernel", EVERY)
def test_report_36_a_finite_bias_is_in_natural_log_units(kernel):
    q, k, v = draw(Shape(1, 2, 2, 40, 64, 64))
    bias = torch.zeros(64)
    bias[::2] = -2.0
    out, _ = compared(kernel, (q, k, v), bias)
    for wrong in (bias / math.log(2), bias * math.log(2), torch.zeros(64)):
        assert relative_l1(naive(q, k, v, wrong)[0], out) > 0.04


@pytest.mark.parametrize("kernel", EVERY)
def test_report_37_dead_rows_are_zero_and_dead_blocks_leave_nothing(kernel):
    q, k, v = draw(Shape(1, 2, 2, 40, 200, 64))
    mask = torch.ones(40, 200, dtype=torch.bool)
    mask[3] = False
    mask[7:9, :128] = False
    floats = torch.zeros(40, 200).masked_fill(~mask, -math.inf)
    for given in (mask, floats):
        out, lse = compared(kernel, (q, k, v), given)
        assert (out[:, :, 3] == 0).all()
        assert (lse[:, :, 3] == -math.inf).all()
    out, lse = attention(q, k, v, torch.zeros(200).bool(), kernel=kernel, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize(
    ("value", "dtype"),
    [(-1e4, torch.float16), (torch.finfo(torch.bfloat16).min, torch.bfloat16), (-1e30, None)],
    ids=str,
)
def test_report_39_large_negative_masks_give_no_nan(kernel, value, dtype):
    dtype = dtype or torch.float32
    q, k, v = draw(GROUPED, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    mask = torch.zeros(33, 70).masked_fill(~bool_mask((33, 70)), value).to(dtype)
    expected = naive(q, k, v, mask)[0]
    out = attention(q, k, v, mask, kernel=kernel)
    assert relative_l1(out.float(), expected) < limit(kernel) + 4e-3


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize("form", [(2, 1, 1, 70), (33, 70)], ids=str)
def test_report_41_causal_and_a_mask_hold_together(kernel, form):
    out, _ = compared(kernel, draw(GROUPED), bool_mask(form), is_causal=True)
    for alone in (
        naive(*draw(GROUPED), causal=True),
        naive(*draw(GROUPED), bool_mask(form)),
    ):
        assert relative_l1(alone[0], out) > 0.1


def test_report_42_grouped_heads_beside_a_mask_stay_off_the_math_backend(monkeypatch):
    """It holds all scores at once; the fused backends need K and V repeated."""
    seen = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda q, k, v, **more: seen.append((q.shape, k.shape, more)) or real(q, k, v, **more),
    )
    q, k, v = draw(GROUPED)
    attention(q, k, v, bool_mask((2, 1, 1, 70)), enable_gqa=True)
    ((of_q, of_k, options),) = seen
    assert of_q[1] == of_k[1] == 4
    assert not options.get("enable_gqa")


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_in_hidden_keys_does_not_leak(kernel, bad):
    if kernel in ("sdpa", "auto"):
        pytest.skip("the host's attention multiplies hidden values by 0")
    q, k, v = draw(GROUPED)
    mask = torch.arange(70) < 50
    clean = attention(q, k, v, mask, kernel=kernel)
    k[:, :, 50:], v[:, :, 50:] = bad, bad
    assert torch.equal(attention(q, k, v, mask, kernel=kernel), clean)


@pytest.mark.parametrize("kernel", EVERY)
def test_report_60_mask_and_sinks_are_not_written(kernel):
    mask, sinks = torch.randn(2, 1, 33, 70), torch.randn(4)
    before = (mask.clone(), sinks.clone())
    attention(*draw(GROUPED), mask, kernel=kernel, sinks=sinks, window=(20, 3), softcap=5.0)
    assert torch.equal(mask, before[0])
    assert torch.equal(sinks, before[1])
    assert mask._version == sinks._version == 0


# -- window, soft cap, sinks ------------------------------------------------------------------


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize("window", [(8, 3), (0, 0), (-1, 2), (5, -1), [4, 4], (100, 100)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_is_aligned_to_the_last_key(kernel, window, causal):
    out, _ = compared(kernel, draw(GROUPED), window=window, is_causal=causal)
    wide = attention(*draw(GROUPED), kernel=kernel, is_causal=causal)
    cuts = window[0] not in (-1, 100) or (window[1] not in (-1, 100) and not causal)
    assert (relative_l1(wide, out) > 0.05) == cuts


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize("softcap", [0.5, 3.0, 50])
def test_report_54_a_soft_cap_is_on_the_scaled_score(kernel, softcap):
    q, k, v = draw(GROUPED)
    compared(kernel, (q, k, v), softcap=softcap)
    compared(kernel, (q, k, v), torch.randn(33, 70), softcap=softcap, is_causal=True)
    q = q * 100 * softcap
    assert attention(q, k, v, kernel=kernel, softcap=softcap).isfinite().all()


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_take_weight_and_give_no_value(kernel, dtype):
    tensors = draw(GROUPED)
    sinks = torch.tensor([-3.0, 0.0, 4.0, 9.0], dtype=dtype)
    out, _ = compared(kernel, tensors, sinks=sinks)
    assert out[:, 3].abs().mean() < 0.5 * attention(*tensors, kernel=kernel)[:, 3].abs().mean()
    mask = torch.ones(33, 70, dtype=torch.bool)
    mask[5] = False
    out, lse = compared(kernel, tensors, mask, sinks=sinks, window=(30, -1))
    assert (out[:, :, 5] == 0).all()
    torch.testing.assert_close(lse[:, :, 5], sinks.float().expand(2, 4), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kernel", EVERY)
def test_all_at_once(kernel):
    mask = torch.randn(2, 4, 33, 70).masked_fill(~bool_mask((33, 70)), -math.inf)
    compared(
        kernel, draw(GROUPED), mask, is_causal=True, window=(40, 0), softcap=4.0,
        sinks=torch.randn(4), scale=0.2,
    )  # fmt: skip


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize("scale", [0.25, 0, -0.125])
def test_report_94_scale_is_used_zero_and_negative_too(kernel, scale):
    tensors = draw(GROUPED)
    out, _ = compared(kernel, tensors, scale=scale)
    assert relative_l1(attention(*tensors, kernel=kernel), out) > 0.1


# -- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["auto", "sage", "sdpa"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_mask": torch.ones(33, 69)}, r"attn_mask \(33, 69\).*\(2, 4, 33, 70\)"),
        ({"attn_mask": torch.ones(2, 70)}, r"attn_mask \(2, 70\) does not broadcast"),
        ({"attn_mask": torch.ones(1, 1, 1, 33, 70)}, "does not broadcast"),
        ({"attn_mask": torch.ones(33, 70, dtype=torch.int64)}, "int64; it needs bool"),
        ({"attn_mask": torch.ones(33, 70, dtype=torch.float64)}, "float64; it needs bool"),
        ({"attn_mask": torch.ones(33, 70, device="meta")}, "attn_mask is on meta and q on cpu"),
        ({"window": (3,)}, r"window is \(3,\); it needs two integers"),
        ({"window": (3, -2)}, "at least -1"),
        ({"window": (3.0, 1)}, "two integers"),
        ({"window": (True, 1)}, "two integers"),
        ({"window": 5}, "window is 5"),
        ({"softcap": -1.0}, "softcap is -1.0; it needs a finite number above 0"),
        ({"softcap": math.nan}, "softcap is nan"),
        ({"softcap": math.inf}, "softcap is inf"),
        ({"softcap": None}, "softcap is None"),
        ({"scale": math.nan}, "scale is nan; it needs a finite number"),
        ({"scale": math.inf}, "scale is inf"),
        ({"sinks": torch.ones(2)}, r"sinks is \(2,\); it needs one logit a query head, \(4,\)"),
        ({"sinks": torch.ones(1, 4)}, "one logit a query head"),
        ({"sinks": torch.ones(4, dtype=torch.int32)}, "sinks is torch.int32; it needs float16"),
        ({"sinks": torch.ones(4, dtype=torch.float64)}, "sinks is torch.float64"),
        ({"sinks": torch.ones(4, device="meta")}, "sinks is on meta and q on cpu; move"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_answered_with_what_is_allowed(kernel, options, words):
    with pytest.raises(UnsupportedInputError, match=words):
        attention(*draw(GROUPED), kernel=kernel, **options)


@pytest.mark.parametrize("which", ["attn_mask", "sinks"])
def test_report_95_a_gradient_of_mask_or_sinks_is_not_lost(which):
    tensors = draw(GROUPED)
    extra = (torch.randn(33, 70) if which == "attn_mask" else torch.randn(4)).requires_grad_()
    with pytest.raises(UnsupportedInputError, match="a gradient is needed"):
        attention(*tensors, kernel="sage", **{which: extra})
    attention(*tensors, **{which: extra})[..., 0].sum().backward()
    ours = extra.grad.clone()
    assert ours.abs().sum() > 0
    step = torch.zeros_like(extra)
    step.view(-1)[1] = 1e-2
    name = "mask" if which == "attn_mask" else which
    with torch.no_grad():
        high, low = (naive(*tensors, **{name: extra + s})[0][..., 0].sum() for s in (step, -step))
    torch.testing.assert_close(ours.view(-1)[1].double(), (high - low) / 2e-2, rtol=1e-2, atol=1e-3)
    with torch.no_grad():
        attention(*tensors, kernel="sage", **{which: extra})


def test_a_mask_in_fp64_goes_with_inputs_in_fp64():
    q, k, v = draw(GROUPED, torch.float64)
    mask = torch.randn(33, 70, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, mask), expected)
    with pytest.raises(UnsupportedInputError, match="dtype float64"):
        attention(q, k, v, mask, kernel="sage")


def test_dropout_beside_sinks_is_refused_and_not_ignored():
    with pytest.raises(UnsupportedInputError, match="dropout"):
        attention(*draw(GROUPED), dropout_p=0.5, sinks=torch.zeros(4))
