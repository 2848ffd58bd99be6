"""Options that commands share: shapes and drawn inputs from what was typed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_plugin.cli.options import DrawnInputOptions, ShapeOptions
from sage_plugin.errors import UsageError
from sage_plugin.kernels.call_words import describe
from sage_plugin.measure.inputs import presets, self_attention
from sage_plugin.measure.masks import synthetic_mask


def test_a_shape_has_the_defaults_of_its_query_side():
    (shape,) = ShapeOptions(seq_len=["64"]).shapes()
    assert shape == self_attention(1, 5, 64, 128)
    options = ShapeOptions(
        seq_len=["16,32"], seq_len_k=8, batch_size=2, num_heads=4, num_heads_k=2, head_dim=32,
        layout="bshd", causal=True, dtype="fp16", mask="dense",
    )  # fmt: skip
    first, second = options.shapes()
    assert (first.seq_q, second.seq_q, second.seq_k, second.heads_k) == (16, 32, 8, 2)
    assert describe(first) == "2x4:2 heads of 32, 16:8 tokens, fp16 bshd causal dense"
    assert describe(dataclasses.replace(first, causal=False, mask_kind="none")).endswith("bshd")


def test_presets_by_name_and_all():
    asked = DrawnInputOptions(
        preset=["wan-720p", "wan-720p"], inputs_distribution="drift", seed=1, dtype="fp16"
    )
    (made,) = asked.inputs()
    assert (made.name, made.shape.dtype, made.label) == ("wan-720p", "float16", "synthetic:drift:1")
    every = DrawnInputOptions(preset=["all"]).inputs()
    assert [one.shape for one in every] == list(presets().values())


def test_nothing_given_is_nothing_to_draw_and_fits_captures():
    assert DrawnInputOptions().inputs() == []
    DrawnInputOptions(seed=7).refuse_with_captures()
    with pytest.raises(UsageError, match="--mask does not change captures"):
        DrawnInputOptions(mask="none").refuse_with_captures()


@pytest.mark.parametrize("kind", ["none", "key_bias", "dense"])
def test_presets_and_shapes_with_a_drawn_mask(kind):
    (preset,) = DrawnInputOptions(preset=["wan-480p"], mask=kind).inputs()
    assert preset.shape.mask_kind == kind
    small = DrawnInputOptions(seq_len=["32"], num_heads=4, head_dim=32, mask=kind, seed=3)
    (case,) = small.inputs()
    judged = case.load("cpu")
    drawn = synthetic_mask(case.shape, device="cpu", seed=3)
    assert case.timed(judged, "cpu") is judged
    assert judged.mask is None if kind == "none" else torch.equal(judged.mask, drawn)
