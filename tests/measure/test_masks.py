"""Drawn masks hide what they say, and captured ones come back at the full size."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_plugin.errors import UsageError
from sage_plugin.measure.inputs import self_attention
from sage_plugin.measure.masks import synthetic_mask

SHAPE = self_attention(3, 2, 64, 32)


def drawn(seed: int = 0, **changes) -> torch.Tensor:
    return synthetic_mask(dataclasses.replace(SHAPE, **changes), device="cpu", seed=seed)


def test_padding_keeps_the_first_keys_of_each_batch_item():
    kept = []
    for seed in range(20):
        mask = drawn(seed, mask_kind="key_bias", seq_k=40)
        assert mask.shape == (3, 1, 1, 40)
        counts = mask[:, 0, 0].sum(-1)
        assert torch.equal(mask[:, 0, 0], torch.arange(40) < counts[:, None])
        kept += counts.tolist()
    assert min(kept) in (20, 21)
    assert max(kept) in (38, 39)
    assert torch.equal(drawn(3, mask_kind="key_bias"), drawn(3, mask_kind="key_bias"))


@pytest.mark.parametrize(("seq_q", "seq_k"), [(64, 64), (40, 70), (70, 40), (9, 1)])
def test_dense_masks_are_blocks_with_odds_of_a_half_and_every_row_sees_its_own_key(seq_q, seq_k):
    mask = drawn(1, mask_kind="dense", seq_q=seq_q, seq_k=seq_k)
    assert mask.shape == (3, 1, seq_q, seq_k)
    own = (torch.arange(seq_q) + seq_k - seq_q).clamp(0)
    assert mask[:, 0, torch.arange(seq_q), own].all()
    if seq_k > 1:
        assert 0.4 < mask.float().mean().item() < 0.8
        assert not torch.equal(mask[0], mask[1])
        assert not torch.equal(mask, drawn(2, mask_kind="dense", seq_q=seq_q, seq_k=seq_k))


def test_blocks_are_an_eighth_of_the_shorter_side_and_at_most_128_wide():
    for seq_q, seq_k, block in ((64, 256, 8), (2048, 1024, 128), (2048, 4096, 128)):
        mask = drawn(mask_kind="dense", batch=1, seq_q=seq_q, seq_k=seq_k)[0, 0]
        edges = (mask[:, 1:] != mask[:, :-1]).any(0).nonzero()[:, 0] + 1
        assert edges.min() >= block
        assert (edges % block == 0).all()
        assert len(edges) == seq_k // block - 1


def test_no_mask_and_an_unknown_one():
    assert drawn() is None
    with pytest.raises(UsageError, match="'diagonal': allowed are none"):
        drawn(mask_kind="diagonal")
