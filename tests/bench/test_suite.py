"""Which cases come out of folders, presets and shapes, and what they load."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

from sage_plugin.bench import suite
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.errors import CaptureError, UsageError
from sage_plugin.measure.inputs import presets, self_attention
from sage_plugin.measure.masks import synthetic_mask
from tests.bench.folders import SHAPE, write


def test_captures_are_named_and_limited(tmp_path):
    folder = write(tmp_path / "captures", count=4)
    assert len(suite.captured(folder).cases) == 4
    few = suite.captured(folder, 2)
    assert len(few.cases) == 2
    assert few.cases[0].name == "000000 transformer.blocks.0.attn step 0"
    assert few.cases[0].source == "capture"


@pytest.mark.parametrize("kind", ["key_bias", "dense"])
def test_masked_captures_come_with_their_mask(tmp_path, kind):
    shape = dataclasses.replace(SHAPE, batch=2, heads_q=8, heads_k=4, mask_kind=kind)
    folder = write(tmp_path / "captures", shape, heads=(1, 3))
    made = suite.captured(folder)
    assert made.skipped == ()
    inputs = suite.load(made.cases[0], torch.device("cpu"))
    stored = open_captures(folder).load(made.cases[0].record)
    assert torch.equal(inputs.judged_mask, stored.mask)
    assert inputs.timed_mask is inputs.judged_mask
    assert inputs.judged_mask.shape == ((2, 1, 1, 48) if kind == "key_bias" else (2, 4, 48, 48))
    assert inputs.shape.mask_kind == kind


def test_a_masked_capture_elsewhere_is_timed_with_the_mask_of_the_full_shape(tmp_path, monkeypatch):
    shape = dataclasses.replace(SHAPE, batch=4, heads_q=8, heads_k=4, mask_kind="dense")
    folder = write(tmp_path / "c", shape, heads=(0,), batches=(1, 2))
    case = suite.captured(folder).cases[0]
    saved = open_captures(folder).load(case.record)
    loads = types.SimpleNamespace(load=lambda *_, **__: saved)
    monkeypatch.setattr(suite, "open_captures", lambda _: loads)
    inputs = suite.load(case, torch.device("cuda:0"))
    assert inputs.judged_mask.shape == (2, 2, 48, 48)
    assert inputs.timed_mask.shape == (4, 8, 48, 48)
    assert torch.equal(inputs.timed_mask[3, 5], saved.mask[1, 1])


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


def test_a_capture_on_a_cpu_is_timed_as_it_was_saved(tmp_path):
    shape = dataclasses.replace(SHAPE, batch=2, heads_q=8, heads_k=4)
    folder = write(tmp_path / "captures", shape, heads=(1, 3), batches=(0,))
    case = suite.captured(folder).cases[0]
    inputs = suite.load(case, torch.device("cpu"))
    assert case.shape == shape
    assert (inputs.shape.batch, inputs.shape.heads_q, inputs.shape.heads_k) == (1, 4, 2)
    assert inputs.timed is inputs.judged
    stored = open_captures(folder).load(case.record)
    assert torch.equal(inputs.judged[0], stored.q)


def test_a_capture_elsewhere_is_timed_at_the_full_shape(tmp_path, monkeypatch):
    shape = dataclasses.replace(SHAPE, batch=2, heads_q=8, heads_k=4, layout="bshd")
    case = suite.captured(write(tmp_path / "c", shape, heads=(0,), batches=(1,))).cases[0]

    class Folder:
        def load(self, record, device):
            assert device == "cuda:0"
            return open_captures(tmp_path / "c").load(record)

    monkeypatch.setattr(suite, "open_captures", lambda folder: Folder())
    inputs = suite.load(case, torch.device("cuda:0"))
    assert inputs.shape == shape
    assert inputs.judged[0].shape == (1, 2, 48, 32)
    assert [t.shape[:2] for t in inputs.timed] == [(2, 8), (2, 4), (2, 4)]


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
    inputs = suite.load(case, torch.device("cpu"))
    drawn = synthetic_mask(shape, device="cpu", seed=3)
    assert inputs.timed_mask is inputs.judged_mask
    assert inputs.judged_mask is None if kind == "none" else torch.equal(inputs.timed_mask, drawn)
