"""References of calls with masks, windows, caps and sinks, and what their outputs centre on."""

from __future__ import annotations

import pytest
import torch

from sage_plugin.families.attention import reference as references
from sage_plugin.families.attention.reference import reference, visible_mean
from sage_plugin.kernels.contract import AttentionParams
from tests.kernels.calls import Shape, draw
from tests.kernels.problems import MASKS, mask_of
from tests.matrix.definition import defined, seen_by

SHAPE = Shape(2, 4, 2, 12, 20, 8)
ROWS = torch.tensor([0, 4, 11])


@pytest.fixture(autouse=True)
def _fresh_cache():
    references.clear()
    yield
    references.clear()


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("window", [(-1, -1), (3, -1), (2, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_the_mean_is_over_the_keys_that_a_row_sees(kind, window, causal):
    _, _, v = draw(SHAPE)
    problem = AttentionParams(1.0, causal, "bhsd", mask_of(kind, SHAPE), window)
    found = visible_mean(
        v, ROWS, seq_q=12, heads_q=4, causal=causal, mask=problem.mask, window=window
    )
    seen = seen_by(problem, 2, 4, 12, 20)
    for b, h, r in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(3)).tolist():
        keys = v[b, h // 2][seen[b, h, ROWS[r]]]
        expected = keys.mean(0) if len(keys) else torch.zeros(8)
        row = r if found.shape[2] > 1 else 0
        assert torch.allclose(found[b, h, row], expected, atol=1e-5)


def test_what_is_not_finite_and_hidden_is_not_in_the_mean():
    v = torch.ones(1, 1, 4, 2)
    v[0, 0, 3] = torch.nan
    mask = torch.tensor([True, True, True, False]).view(1, 1, 1, 4)
    found = visible_mean(v, ROWS[:1], seq_q=4, heads_q=1, causal=False, mask=mask)
    assert (found == 1).all()


def test_a_reference_follows_all_parts_of_its_call_and_is_kept_for_each(monkeypatch):
    calls = []
    exact = references.oracle
    monkeypatch.setattr(
        references, "oracle", lambda *a, **kw: (calls.append(1), exact(*a, **kw))[1]
    )
    q, k, v = draw(SHAPE)
    mask, sinks = mask_of("float", SHAPE), torch.ones(4)
    variants = [
        {},
        {"mask": mask},
        {"mask": mask_of("float", SHAPE, seed=1)},
        {"window": (3, 2)},
        {"softcap": 2.0},
        {"sinks": sinks},
        {"sinks": sinks * 2},
        {"mask": mask, "window": (3, 2), "softcap": 2.0, "sinks": sinks},
    ]
    for options in variants:
        found = reference(q, k, v, causal=True, scale=0.3, rows=ROWS, **options)
        expected, _ = defined(q, k, v, AttentionParams(0.3, True, "bhsd", **options))
        assert torch.allclose(found.out.double(), expected[:, :, ROWS], atol=1e-5)
        again = {name: x.clone() if name in ("mask", "sinks") else x for name, x in options.items()}
        assert reference(q, k, v, causal=True, scale=0.3, rows=ROWS, **again) is found
    assert len(calls) == len(variants)
