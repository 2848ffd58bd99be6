"""Presets, synthetic distributions and captures at full size."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_plugin.errors import UsageError
from sage_plugin.measure.inputs import (
    DISTRIBUTIONS,
    presets,
    self_attention,
    synthetic,
)

SHAPE = self_attention(1, 2, 512, 32, dtype="float32")


def test_presets_are_the_five_video_shapes():
    sizes = {
        name: (s.batch, s.heads_q, s.seq_q, s.head_dim, s.dtype) for name, s in presets().items()
    }
    assert sizes == {
        "cogvideox-2b": (2, 30, 17776, 64, "bfloat16"),
        "wan-720p": (1, 5, 75600, 128, "bfloat16"),
        "hunyuan-540p": (1, 24, 16452, 128, "bfloat16"),
        "hunyuan-720p": (1, 3, 118808, 128, "bfloat16"),
        "wan-480p": (2, 2, 29760, 128, "bfloat16"),
    }


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_synthetic_is_seeded_and_never_constant(distribution):
    first = synthetic(SHAPE, device="cpu", seed=3, distribution=distribution)
    again = synthetic(SHAPE, device="cpu", seed=3, distribution=distribution)
    other = synthetic(SHAPE, device="cpu", seed=4, distribution=distribution)
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        assert not torch.equal(a[:, 0], a[:, 1])
        assert a.std() > 0.5


def test_biased_shifts_each_channel_of_k_and_v():
    q, k, v = synthetic(SHAPE, device="cpu", distribution="biased")
    assert k.mean(2).std().item() == pytest.approx(3.0, rel=0.25)
    assert v.mean(2).std().item() == pytest.approx(1.0, rel=0.25)
    assert q.mean(2).std().item() < 0.1


def test_drift_moves_v_from_one_to_minus_one():
    _, _, v = synthetic(SHAPE, device="cpu", distribution="drift")
    assert v[:, :, :256].mean().item() == pytest.approx(1.0, abs=0.05)
    assert v[:, :, 256:].mean().item() == pytest.approx(-1.0, abs=0.05)


def test_outlier_has_two_large_channels_of_k():
    _, k, v = synthetic(SHAPE, device="cpu", distribution="outlier")
    spread = k.std(2)[0]
    assert spread[:, :2].min() > 30
    assert spread[:, 2:].max() < 1.5
    assert v.std() < 1.5


def test_layout_is_how_memory_lies_and_not_how_it_is_indexed():
    shape = dataclasses.replace(SHAPE, heads_k=1, seq_k=100, layout="bshd", dtype="float16")
    q, k, v = synthetic(shape, device="cpu")
    assert q.shape == (1, 2, 512, 32)
    assert k.shape == v.shape == (1, 1, 100, 32)
    assert q.transpose(1, 2).is_contiguous()
    assert torch.equal(q, synthetic(dataclasses.replace(shape, layout="bhsd"), device="cpu")[0])


def test_unknown_distribution_and_dtype_are_named():
    with pytest.raises(UsageError, match="'zeros': allowed are normal"):
        synthetic(SHAPE, device="cpu", distribution="zeros")
    with pytest.raises(UsageError, match="'int8': allowed are float16"):
        synthetic(dataclasses.replace(SHAPE, dtype="int8"), device="cpu")
