"""Which cases come out of folders, presets and shapes, and what they load."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_plugin.bench import suite
from sage_plugin.errors import CaptureError, UsageError
from sage_plugin.measure.inputs import presets, self_attention
from sage_plugin.measure.masks import synthetic_mask
from tests.bench.folders import write


def test_captures_are_named_and_limited(tmp_path):
    folder = write(tmp_path / "captures", count=4)
    assert len(suite.captured(folder).cases) == 4
    few = suite.captured(folder, 2)
    assert len(few.cases) == 2
    assert few.cases[0].name == "000000 transformer.blocks.0.attn step 0"
    assert few.cases[0].source == "capture"


def test_names_of_a_foreign_manifest_cannot_command_a_terminal(tmp_path):
    folder = write(tmp_path / "c")
    manifest = folder / "manifest.jsonl"
    line = manifest.read_text().replace("transformer.blocks.0", "a\\u001b[2Jb\\u202ec")
    manifest.write_text(line)
    (case,) = suite.captured(folder).cases
    assert case.record.layer == "a\x1b[2Jb\u202ec.attn"
    assert case.name == r"000000 a\x1b[2Jb\u202ec.attn step 0"


@pytest.mark.parametrize("make", ["missing", "empty", "foreign"])
def test_folders_that_hold_no_captures(tmp_path, make):
    folder = tmp_path / "captures"
    if make != "missing":
        folder.mkdir()
    if make == "foreign":
        (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CaptureError, match="sage capture"):
        suite.captured(folder)


def test_presets_by_name_and_all():
    made = suite.preset(["wan-720p", "wan-720p"], distribution="drift", seed=1, dtype="float16")
    assert [case.shape.dtype for case in made.cases] == ["float16"]
    assert made.cases[0].source == "synthetic:drift"
    every = suite.preset(["all"], distribution="normal", seed=0, dtype=None)
    assert [case.name for case in every.cases] == list(presets())
    with pytest.raises(UsageError, match="'wan': allowed are all, cogvideox-2b"):
        suite.preset(["wan"], distribution="normal", seed=0, dtype=None)


def test_v_of_another_width_is_refused_by_name():
    shape = dataclasses.replace(self_attention(1, 4, 16, 32), dv=16)
    with pytest.raises(UsageError, match="-dv 16 differs from -d 32"):
        suite.explicit(shape, distribution="normal", seed=0)


def test_a_shape_is_described_in_a_few_words():
    shape = dataclasses.replace(self_attention(2, 4, 16, 32), heads_k=2, seq_k=8, causal=True)
    assert suite.describe(shape) == "2x4:2x16:8x32 bfloat16 bhsd causal"
    shape = dataclasses.replace(shape, mask_kind="dense")
    assert suite.describe(shape) == "2x4:2x16:8x32 bfloat16 bhsd causal dense"


@pytest.mark.parametrize("kind", ["none", "key_bias", "dense"])
def test_presets_and_shapes_with_a_drawn_mask(kind):
    (case,) = suite.preset(
        ["wan-480p"], distribution="normal", seed=0, dtype=None, mask_kind=kind
    ).cases
    assert case.shape.mask_kind == kind
    shape = dataclasses.replace(self_attention(2, 4, 32, 32), mask_kind=kind)
    (case,) = suite.explicit(shape, distribution="normal", seed=3).cases
    judged = case.load("cpu")
    drawn = synthetic_mask(shape, device="cpu", seed=3)
    assert case.timed(judged, "cpu") is judged
    assert judged.mask is None if kind == "none" else torch.equal(judged.mask, drawn)
