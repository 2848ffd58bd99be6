"""What captures load, and how they come back at their full size."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_plugin.capture.store.reader import open_captures
from sage_plugin.families.attention.replay import AttentionReplay
from sage_plugin.measure.inputs import self_attention, synthetic
from sage_plugin.replay.inputs import ReplayInputs
from tests.bench.folders import SHAPE, write

LONG = self_attention(1, 2, 512, 32, dtype="float32")


def captured(folder) -> ReplayInputs:
    (record,) = open_captures(folder).records
    return ReplayInputs(record.shape, folder=str(folder), record=record)


@pytest.mark.parametrize("kind", ["key_bias", "dense"])
def test_masked_captures_come_with_their_mask(tmp_path, kind):
    shape = dataclasses.replace(SHAPE, batch=2, heads_q=8, heads_k=4, mask_kind=kind)
    inputs = captured(write(tmp_path / "captures", shape, heads=(1, 3)))
    judged = inputs.load("cpu")
    stored = open_captures(inputs.folder).load(inputs.record)
    assert torch.equal(judged.mask, stored.mask)
    assert inputs.timed(judged, "cpu").mask is judged.mask
    assert judged.mask.shape == ((2, 1, 1, 48) if kind == "key_bias" else (2, 4, 48, 48))
    assert judged.shape.mask_kind == kind


def test_a_masked_capture_elsewhere_is_timed_with_the_mask_of_the_full_shape(tmp_path):
    shape = dataclasses.replace(SHAPE, batch=4, heads_q=8, heads_k=4, mask_kind="dense")
    inputs = captured(write(tmp_path / "c", shape, heads=(0,), batches=(1, 2)))
    judged = inputs.load("cpu")
    timed = inputs.timed(judged, "cuda:0")
    assert judged.mask.shape == (2, 2, 48, 48)
    assert timed.mask.shape == (4, 8, 48, 48)
    assert torch.equal(timed.mask[3, 5], judged.mask[1, 1])


def test_a_capture_on_a_cpu_is_timed_as_it_was_saved(tmp_path):
    shape = dataclasses.replace(SHAPE, batch=2, heads_q=8, heads_k=4)
    inputs = captured(write(tmp_path / "captures", shape, heads=(1, 3), batches=(0,)))
    judged = inputs.load("cpu")
    assert inputs.shape == shape
    assert (judged.shape.batch, judged.shape.heads_q, judged.shape.heads_k) == (1, 4, 2)
    assert inputs.timed(judged, "cpu") is judged
    stored = open_captures(inputs.folder).load(inputs.record)
    assert torch.equal(judged.tensors[0], stored.q)


def test_a_capture_elsewhere_is_timed_at_the_full_shape(tmp_path):
    shape = dataclasses.replace(SHAPE, batch=2, heads_q=8, heads_k=4, layout="bshd")
    inputs = captured(write(tmp_path / "c", shape, heads=(0,), batches=(1,)))
    judged = inputs.load("cpu")
    timed = inputs.timed(judged, "cuda:0")
    assert timed.shape == shape
    assert judged.tensors[0].shape == (1, 2, 48, 32)
    assert [t.shape[:2] for t in timed.tensors] == [(2, 8), (2, 4), (2, 4)]


def test_full_size_repeats_saved_heads_with_their_groups():
    saved_shape = dataclasses.replace(LONG, heads_q=4, heads_k=2, seq_q=8, seq_k=8)
    q, k, v = synthetic(saved_shape, device="cpu")
    full = dataclasses.replace(saved_shape, batch=2, heads_q=10, heads_k=5, layout="bshd")
    big_q, big_k, big_v = AttentionReplay((q, k, v), None, saved_shape).full_size(full).tensors
    assert big_q.shape == (2, 10, 8, 32)
    assert big_k.shape == big_v.shape == (2, 5, 8, 32)
    assert big_q.transpose(1, 2).is_contiguous()
    for head in range(5):
        assert torch.equal(big_k[1, head], k[0, head % 2])
        assert torch.equal(big_q[1, 2 * head + 1], q[0, 2 * (head % 2) + 1])


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("own_heads", [False, True])
def test_mask_entries_stay_with_their_heads_and_batch_items(rows, batch, own_heads):
    full = dataclasses.replace(LONG, batch=4, heads_q=12, heads_k=6, seq_q=5, seq_k=7)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    mask = torch.randn(batch, 4 if own_heads else 1, rows, 7)
    saved = dataclasses.replace(full, batch=2, heads_q=4, heads_k=2)
    timed = AttentionReplay((q, k, k), mask, saved).full_size(full)
    found, big_q = timed.mask, timed.tensors[0]
    assert found.shape == (4 if batch > 1 else 1, 12 if own_heads else 1, rows, 7)
    for b in range(4):
        for h in range(12):
            # The saved query head that stands here, by its contents.
            from_b, from_h = (q == big_q[b, h]).all((2, 3)).nonzero()[0].tolist()
            expected = mask[from_b % batch, from_h if own_heads else 0]
            assert torch.equal(found[b % found.shape[0], h % found.shape[1]], expected)


def test_one_entry_for_all_is_not_copied():
    tensors = synthetic(LONG, device="cpu")
    mask = torch.ones(1, 1, 5, 7, dtype=torch.bool)
    twice = dataclasses.replace(LONG, heads_q=4, heads_k=4)
    assert AttentionReplay(tensors, mask, LONG).full_size(twice).mask is mask
    assert AttentionReplay(tensors, None, LONG).full_size(twice).mask is None
