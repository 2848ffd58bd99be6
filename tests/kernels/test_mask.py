"""Masks, window, cap and sinks of `attention()`: their form, their gradients, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention.api import attention
from sage_plugin.kernels.attention.mask import mask_kind, normalized
from tests.kernels.calls import Shape, draw
from tests.matrix.definition import definition

GROUPED = Shape(2, 4, 2, 33, 70, 64)


@pytest.fixture(autouse=True)
def _alone(unconfigured):
    """No environment, no user's configs."""


def bool_mask(shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator) > 0.4


# -- masks ------------------------------------------------------------------------------------


def test_report_35_an_expanded_mask_shrinks_and_is_never_copied():
    mask = bool_mask((2, 1, 1, 70))
    kept = normalized(mask.expand(2, 4, 33, 70), batch=2, heads_q=4, seq_q=33, seq_k=70)
    assert kept.shape == (2, 1, 1, 70)
    assert kept.data_ptr() == mask.data_ptr()
    assert mask_kind(kept) == "key_bias"
    dense = normalized(bool_mask((33, 70)), batch=2, heads_q=4, seq_q=33, seq_k=70)
    assert (dense.shape, mask_kind(dense)) == ((1, 1, 33, 70), "dense")
    assert mask_kind(None) == "none"


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
        high, low = (
            definition(*tensors, **{name: extra + s})[0][..., 0].sum() for s in (step, -step)
        )
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
