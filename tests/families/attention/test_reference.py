"""Sampled rows, the mean of visible V, and the cache by content."""

from __future__ import annotations

import pytest
import torch

from sage_plugin.families.attention import reference as references
from sage_plugin.families.attention.reference import reference, sample_rows, visible_mean
from sage_plugin.measure.inputs import self_attention, synthetic


@pytest.fixture(autouse=True)
def _fresh_cache():
    references.clear()
    yield
    references.clear()


def test_rows_are_a_seeded_sample_with_both_ends():
    rows = sample_rows(10_000)
    assert len(rows) == len(set(rows.tolist())) == 256
    assert rows[:4].tolist() == [0, 1, 2, 3]
    assert rows[-4:].tolist() == [9996, 9997, 9998, 9999]
    assert torch.equal(rows, rows.sort().values)
    assert torch.equal(rows, sample_rows(10_000))
    assert not torch.equal(rows, sample_rows(10_000, seed=1))


def test_short_calls_are_judged_whole():
    assert sample_rows(256).tolist() == list(range(256))
    assert sample_rows(1).tolist() == [0]


def test_visible_mean_without_a_mask_is_the_mean():
    v = torch.randn(2, 2, 5, 3)
    mean = visible_mean(v, torch.tensor([0, 4]), seq_q=5, heads_q=4, causal=False)
    assert mean.shape == (2, 4, 1, 3)
    assert torch.allclose(mean[1, 3, 0], v[1, 1].mean(0))


@pytest.mark.parametrize(("seq_q", "seq_k"), [(4, 4), (3, 5), (5, 3)])
def test_causal_visible_mean_is_the_running_mean(seq_q, seq_k):
    v = torch.randn(1, 1, seq_k, 3)
    rows = torch.arange(seq_q)
    mean = visible_mean(v, rows, seq_q=seq_q, heads_q=1, causal=True)[0, 0]
    for row in range(seq_q):
        seen = max(0, row + 1 + seq_k - seq_q)
        expected = v[0, 0, :seen].mean(0) if seen else torch.zeros(3)
        assert torch.allclose(mean[row], expected, atol=1e-6)


def test_same_content_is_computed_once(monkeypatch):
    calls = []
    exact = references.oracle
    monkeypatch.setattr(
        references, "oracle", lambda *a, **kw: (calls.append(1), exact(*a, **kw))[1]
    )
    q, k, v = synthetic(self_attention(1, 1, 16, 8), device="cpu")
    first = reference(q, k, v)
    assert reference(q.clone(), k, v) is first
    assert len(calls) == 1
    reference(q, k, v, causal=True)
    reference(q, k, v, scale=1.0)
    reference(q, k, v, rows=torch.tensor([3]))
    v[0, 0, 0, 0] += 1
    reference(q, k, v)
    assert len(calls) == 5


def test_the_cache_is_bounded():
    for seed in range(references.CACHED + 3):
        q, k, v = synthetic(self_attention(1, 1, 4, 4), device="cpu", seed=seed)
        reference(q, k, v)
    assert len(references._CACHE) == references.CACHED
