"""Recorded linears: rows are those that the linear got, and its weight is told by reference."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import sage_plugin
from sage_plugin.capture.record import LinearCapture
from sage_plugin.capture.recording.recorder import record
from sage_plugin.capture.store.linear_file import weight_hash
from sage_plugin.capture.store.manifest import MANIFEST
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.errors import CaptureError, UsageError
from sage_plugin.families import family
from tests.capture.toys import LAYERS, denoise, video_model

LINEAR = family("linear")
EACH = 6
"""Linears of a block that could be quantized: to_q, to_k, to_v, to_out, and two of feed-forward."""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "captures"


def seen_by(model, name):
    """The inputs of one linear, copied, as a hook of one's own sees them."""
    seen = []
    module = model.get_submodule(name)
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    return seen


@pytest.mark.parametrize("kernel", [None, "fp8_row"], ids=["unpatched", "patched"])
def test_rows_and_weight_are_those_of_the_model(folder, kernel):
    model = video_model()
    name = "transformer_blocks.1.ff.net.2"
    weight = model.get_submodule(name).weight.detach().clone()
    if kernel is not None:
        sage_plugin.patch(model, kernel="sdpa", linears=kernel)
    seen = seen_by(model, name)
    with record(model, folder, ops="linear", max_captures=500, rows=5) as recorder:
        denoise(model, steps=2)
    captures = open_captures(folder, "linear")
    assert recorder.summary.calls_seen == 2 * LAYERS * EACH == len(captures.records)
    mine = [one for one in captures.records if one.layer == f"transformer.{name}"]
    assert [(one.step, one.call_index, one.rows) for one in mine] == [(0, 0, 5), (1, 0, 5)]
    for one, x in zip(mine, seen, strict=True):
        rows = x.reshape(-1, x.shape[-1])
        got = captures.tensors(one)
        assert one.shape.rows == rows.shape[0] == 80
        assert torch.equal(got["x"], rows[[8, 24, 40, 56, 72]])
        assert torch.equal(got["bias"], model.get_submodule(name).bias)
        assert torch.equal(captures.weight(one), weight)
        assert (one.weight_key, one.weight_sha256) == (f"{name}.weight", weight_hash(weight))
    weights = {one.weight_file for one in captures.records}
    assert len(weights) == LAYERS * EACH == len(list(folder.glob("w-*")))
    assert captures.call_counts.families == dict.fromkeys(captures.counts, "linear")
    layers = {row.layer: sum(row.calls) for row in captures.call_counts.layer_calls}
    assert layers == captures.counts


def test_a_recording_changes_nothing_and_leaves_no_hook(folder):
    model = video_model()
    hooks = {n: len(m._forward_pre_hooks) for n, m in model.named_modules()}
    with record(model, folder, ops="attention,linear", max_captures=4) as recorder:
        copied = copy.deepcopy(model)
        denoise(model, steps=2)
        denoise(copied, steps=1)  # which is not watched
    assert {n: len(m._forward_pre_hooks) for n, m in model.named_modules()} == hooks
    assert recorder.summary.calls_seen == 2 * LAYERS * (EACH + 1)
    both = open_captures(folder)
    assert [one.family for one in both.records].count("linear") == 4
    assert len(open_captures(folder, "attention").records) == 4
    counts = both.call_counts
    assert sum(counts.of("attention").values()) == 2 * LAYERS
    assert sum(counts.of("linear").values()) == 2 * LAYERS * EACH


def test_a_model_that_is_patched_anew_is_counted_once(folder):
    model = video_model()
    handle = sage_plugin.patch(model, kernel="sdpa", linears="int8_row")
    with record(model, folder, ops="linear", max_captures=4) as recorder:
        handle.unpatch()
        handle = sage_plugin.patch(model, kernel="sdpa")
        recorder.observe(model)
        denoise(model, steps=1)
    assert recorder.summary.calls_seen == LAYERS * EACH
    assert {one.call_index for one in open_captures(folder).records} == {0}


def test_a_replaced_capture_takes_its_weight_along(folder):
    model = video_model()
    with record(model, folder, ops="linear", max_captures=2):
        denoise(model, steps=6)
    kept = {one.weight_file for one in open_captures(folder).records}
    assert kept == {path.name for path in folder.glob("w-*")}
    with record(model, folder, ops="linear", max_captures=2, overwrite=True):
        denoise(model, steps=6)
    again = open_captures(folder)
    assert again.problems == ()
    assert {one.weight_file for one in again.records} == {p.name for p in folder.glob("w-*")}


def test_a_weight_too_large_for_the_budget_is_named_where_it_is_missed(folder):
    model = video_model()
    with record(model, folder, ops="linear", layers="*.ff.*", max_captures=1, max_bytes=18_000):
        denoise(model, steps=1)
    captures = open_captures(folder)
    (one,) = captures.records
    assert isinstance(one, LinearCapture)
    assert (one.weight_file, list(folder.glob("w-*"))) == ("", [])
    assert one.rows > 1
    with pytest.raises(CaptureError, match=r"ff\.net.* was larger than the budget .* --max-bytes"):
        LINEAR.captured(captures, one, "cpu")
    assert "has no weight beside it" in str(captures.damage(one))


def damaged(folder, change):
    model = video_model()
    with record(model, folder, ops="linear", max_captures=1):
        denoise(model, steps=1)
    (one,) = open_captures(folder).records
    line = json.loads((folder / MANIFEST).read_text())
    change(folder / one.weight_file, line)
    (folder / MANIFEST).write_text(json.dumps(line) + "\n")
    return one


def flip(weight, line):
    data = bytearray(weight.read_bytes())
    data[-1] ^= 1
    weight.write_bytes(data)


WRONG = {
    "missing": (lambda weight, line: weight.unlink(), r"w-\w+\.safetensors is missing"),
    "elsewhere": (lambda weight, line: line.update(weight_file="../w.safetensors"), "plain file"),
    "rows": (lambda weight, line: line.update(rows=0), "0 saved rows of 80"),
    "more rows": (lambda weight, line: line.update(rows=7), "does not match its manifest line"),
    "features": (
        lambda weight, line: line["shape"].update(out_features=3, bias=False),
        "does not match its manifest line",
    ),
    "of attention": (lambda weight, line: line.update(family="attention"), "unknown field"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_folder_that_cannot_be(folder, what):
    change, words = WRONG[what]
    damaged(folder, change)
    with pytest.raises(CaptureError, match=words):
        open_captures(folder)


def test_another_weight_than_was_recorded_is_refused(folder):
    one = damaged(folder, flip)
    captures = open_captures(folder)
    assert "does not match its checksum" in str(captures.damage(one))
    with pytest.raises(CaptureError, match="does not match its checksum"):
        LINEAR.captured(captures, one, "cpu")


def test_a_replay_computes_what_the_model_did(folder):
    model = video_model()
    out = []
    name = "transformer_blocks.0.attn1.to_k"
    model.get_submodule(name).register_forward_hook(lambda m, a, y: out.append(y.clone()))
    with record(model, folder, ops="linear", layers=f"*{name}", max_captures=1, rows=16):
        denoise(model, steps=1)
    captures = open_captures(folder)
    (one,) = captures.records
    call = LINEAR.captured(captures, one, "cpu")
    assert (call.shape.rows, one.shape.rows, one.is_partial) == (16, 80, True)
    rows = (2 * torch.arange(16) + 1) * 80 // 32
    torch.testing.assert_close(call.whole()(), out[0].reshape(80, -1)[rows])
    assert call.full_size(one.shape).x.shape == (80, 32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ops": "convolution"}, "op: got 'convolution', expected attention, linear"),
        ({"ops": ()}, "op: got 'nothing'"),
        ({"rows": 0, "ops": "linear"}, "rows: got 0"),
        ({"rows": 9}, "rows: a part of calls of linear, which is not recorded"),
        ({"heads": 1, "ops": "linear"}, "heads: a part of calls of attention"),
        ({"ops": "linear", "layers": "*.attn1"}, r"match none of 18 linears"),
    ],
)
def test_what_is_wrong_is_named(folder, options, words):
    with pytest.raises(UsageError, match=words), record(video_model(), folder, **options):
        pass
