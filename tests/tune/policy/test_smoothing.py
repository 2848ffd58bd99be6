"""Smoothing factors of recorded linears, and the search that tries them."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import sage_plugin
from sage_plugin.capture.recording.recorder import record
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.errors import CaptureError, UsageError
from sage_plugin.kernels.linear.weight import smoothing
from sage_plugin.plugin.linears.smoothing import read
from sage_plugin.tune.policy.search import search
from sage_plugin.tune.policy.smoothing import smoothing_of, write
from tests.capture.toys import LAYERS, denoise, video_model
from tests.tune.policy import recordings

BLOCK = "transformer.transformer_blocks.0"
INSIDE = tuple(f"{BLOCK}.attn1.to_{name}" for name in "qkv")
EACH = 6
MS = {
    "bf16": 0.4, "int8_row": 0.2, "int8_row+rotation=256": 0.25, "int8_row+smoothing=true": 0.22,
    "fp8_row": 0.2, "fp8_row+smoothing=true": 0.22, "fp8_tensor": 0.2,
}  # fmt: skip


def outlying():
    """A model whose attention reads a channel that sticks out."""
    model = video_model()
    with torch.no_grad():
        for block in model.transformer_blocks:
            block.norm1.norm.weight[3] = 60.0
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("outliers")
    model = outlying()
    with record(model, path / "captures", ops="linear", max_captures=36):
        denoise(model, steps=2)
    found = smoothing_of(open_captures(path / "captures"))
    write(path / "factors.safetensors", found.factors)
    shapes = {r.shape for r in open_captures(path / "captures").records}
    recordings.times(path / "times.json", MS, tuple(shapes))
    return path


def test_linears_that_read_one_tensor_have_the_factors_of_all_their_weights(folder):
    captures = open_captures(folder / "captures")
    found = smoothing_of(captures, 0.5)
    assert len(found.factors) == LAYERS * EACH
    assert found.inputs == LAYERS * 4
    assert found.notes == ()
    of = {layer: [r for r in captures.records if r.layer == layer] for layer in INSIDE}
    x = torch.cat([captures.tensors(r)["x"] for r in of[INSIDE[0]]]).abs().amax(0)
    weights = torch.cat([captures.weight(of[layer][0]) for layer in INSIDE])
    for layer in INSIDE:
        torch.testing.assert_close(found.factors[layer], smoothing(x, weights, strength=0.5))
    assert int(found.factors[INSIDE[0]].argmax()) == 3
    flat = smoothing_of(captures, 0.0)
    assert flat.factors[INSIDE[0]][3] < 2 * flat.factors[INSIDE[0]].median()
    kept = read(folder / "factors.safetensors")
    assert kept.of(INSIDE[0]) is kept.of(INSIDE[1])
    assert kept.of(INSIDE[0]) is not kept.of(f"{BLOCK}.ff.net.2")


def test_a_folder_without_linears_has_no_factors(tmp_path):
    recordings.write(tmp_path / "attention")
    with pytest.raises(CaptureError, match=r"no captures of linears.*sage capture --op linear"):
        smoothing_of(open_captures(tmp_path / "attention"))


def request(folder, **changes):
    base = recordings.request(folder, times=(folder / "times.json",), min_seq=8)
    return dataclasses.replace(base, **changes)


def test_a_search_spends_time_on_outliers_where_errors_ask_for_it(folder):
    smooths = folder / "factors.safetensors"
    found = search(
        request(folder, max_error=None, max_ms=LAYERS * 2 * EACH * 0.3, smoothing=smooths)
    )
    cells = {cell.layer: cell for cell in found.problem.cells}
    query = {one.label: one.error for one in cells[INSIDE[0]].estimates}
    assert set(query) == set(MS)
    assert query["int8_row+rotation=256"] < 0.7 * query["int8_row"]
    assert query["int8_row+smoothing=true"] < 0.8 * query["int8_row"]
    rules = found.policy.rules
    assert {(rule.rotation, rule.smoothing) for rule in rules} - {(0, False)}
    assert found.policy.smooths == bool(found.policy.smoothing)


def test_the_policy_runs_what_was_chosen_and_names_the_file(folder, tmp_path):
    smooths = folder / "factors.safetensors"
    kernels = ("int8_row+smoothing=true",)
    found = search(request(folder, max_error=1.0, smoothing=smooths, kernels=kernels))
    assert [rule.label for rule in found.policy.rules] == list(kernels)
    path = tmp_path / "policy.json"
    path.write_text(found.policy.text())
    assert json.loads(path.read_text())["smoothing"] == str(smooths.resolve())
    model = outlying()
    with sage_plugin.patched(model, policy=path) as handle:
        assert {row.label for row in handle.report().linears} == set(kernels)


def test_factors_are_needed_to_smooth(folder):
    with pytest.raises(UsageError, match=r"give its factors with --smoothing, as `sage policy"):
        search(request(folder, max_error=1.0, kernels=("int8_row+smoothing=true",)))
    few = folder / "few.safetensors"
    write(few, {INSIDE[0]: torch.ones(32)})
    kernels = ("int8_row+smoothing=true", "int8_row")
    found = search(request(folder, max_error=1.0, smoothing=few, kernels=kernels))
    assert any(f"no smoothing factors of {INSIDE[1]}" in note for note in found.notes)
