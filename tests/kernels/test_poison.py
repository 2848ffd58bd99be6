"""NaN and infinite values in K, V and Q: seen as NaN by the rows that see them, by no other."""

from __future__ import annotations

import math

import pytest
import torch

from sage_plugin.kernels.contract import AttentionParams
from tests.kernels.calls import EMULATED, Shape, draw
from tests.kernels.problems import mask_of, packed_of, run
from tests.matrix.definition import seen_by

EXACT = ("torch", *EMULATED)
SHAPE = Shape(2, 4, 2, 40, 70, 64)
BAD = 37
"""A key in the middle, which a causal mask, a window and a random mask hide from some rows."""

PROBLEMS = {
    "none": AttentionParams(0.125, False, "bhsd"),
    "causal": AttentionParams(0.125, True, "bhsd"),
    "window": AttentionParams(0.125, False, "bhsd", None, (3, 12)),
    "mask": AttentionParams(0.125, False, "bhsd", mask_of("bool", SHAPE)),
    "bias": AttentionParams(0.125, True, "bhsd", mask_of("float", SHAPE)),
    "heads": AttentionParams(0.125, False, "bhsd", mask_of("head_bool", SHAPE, seed=3)),
    "capped": AttentionParams(0.125, True, "bhsd", None, (20, -1), 5.0, torch.zeros(4)),
}


def seen_at(problem, key):
    """`(B, Hq, Sq)` of the rows that see a key."""
    return seen_by(problem, SHAPE.batch, SHAPE.heads_q, SHAPE.seq_q, SHAPE.seq_k)[..., key]


@pytest.mark.parametrize("kernel", EXACT)
@pytest.mark.parametrize("name", ["causal", "window", "mask", "bias"])
def test_what_the_bad_row_holds_makes_no_difference_to_others(kernel, name):
    problem = PROBLEMS[name]
    sees = seen_at(problem, BAD)
    outs = []
    for value in (math.nan, math.inf):
        q, k, v = draw(SHAPE)
        k[:, :, BAD] = value
        v[:, :, BAD] = -value
        outs.append(run(kernel, q, k, v, problem)[0])
    assert (~sees).any()
    assert torch.equal(outs[0][~sees], outs[1][~sees])


@pytest.mark.parametrize("kernel", EXACT)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", ["key_bool", "rows", "window"])
def test_a_key_hidden_from_everyone_is_no_part_of_anything(kernel, value, name):
    q, k, v = draw(SHAPE)
    window, mask, bad = (-1, -1), None, [3, BAD, 69]
    if name == "key_bool":
        mask = torch.ones(1, 1, 1, 70, dtype=torch.bool)
        mask[..., bad] = False
    elif name == "rows":  # each row hides it, and others besides
        mask = mask_of("bool", SHAPE).clone()
        mask[..., bad] = False
    else:
        window, bad = (4, -1), [0, 7, 25]
    problem = AttentionParams(0.125, False, "bhsd", mask, window)
    k[:, :, bad], v[:, :, bad] = 0.0, 0.0
    expected, expected_lse = run(kernel, q, k, v, problem)
    k[:, :, bad], v[:, :, bad] = value, -value
    out, lse = run(kernel, q, k, v, problem)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("kernel", EXACT)
def test_a_bad_sequence_does_not_reach_the_others(kernel):
    q, k, v = (x.transpose(1, 2) for x in draw(Shape(1, 4, 2, 134, 134, 64)))
    ends = [0, 5, 133, 134]
    problem = AttentionParams(0.125, True, "bshd", packed=packed_of(ends, ends))
    expected, _ = run(kernel, q, k, v, problem)
    k, v = k.clone(), v.clone()
    k[:, 20], v[:, 100] = math.nan, math.inf
    out, _ = run(kernel, q, k, v, problem)
    bad = torch.zeros(134, dtype=torch.bool)
    bad[20:133] = True
    assert out[:, bad].isnan().all()
    assert torch.equal(out[:, [*range(5), 133]], expected[:, [*range(5), 133]])
    assert not out[:, 5:20].isnan().any()


@pytest.mark.parametrize("kernel", EXACT)
@pytest.mark.parametrize("granule", [1, 16])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_query_is_nan_alone_and_not_even_that_where_it_sees_nothing(kernel, granule, value):
    q, k, v = draw(SHAPE)
    mask = torch.ones(1, 1, 40, 70, dtype=torch.bool)
    mask[:, :, 9] = False
    problem = AttentionParams(0.125, False, "bhsd", mask)
    fields = {"q_granule": granule, "smooth_k": True}
    q[:, :, 8:10] = 0.0
    expected, _ = run(kernel, q, k, v, problem, **fields)
    q[:, :, 8:10, 2] = value
    out, lse = run(kernel, q, k, v, problem, **fields)
    assert out[:, :, 8].isnan().all()
    assert (out[:, :, 9] == 0).all()
    assert torch.isneginf(lse[:, :, 9]).all()
    others = [i for i in range(40) if i not in (8, 9)]
    assert torch.equal(out[:, :, others], expected[:, :, others])
