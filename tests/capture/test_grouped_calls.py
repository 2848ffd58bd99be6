"""Recorded experts: both grouped linears with the routing that the model made."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

import sage_plugin
from sage_plugin.capture.recording.recorder import record
from sage_plugin.capture.store.linear_file import weight_hash
from sage_plugin.capture.store.manifest import MANIFEST
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.errors import CaptureError
from sage_plugin.families import family
from tests.plugin.experts.mixtures import experts_of, logits, mixture

GROUPED = family("grouped_linear")
LAYER = "model.model.layers.0.mlp.experts"
SHAPE = {"up": (48, 32, 96), "down": (48, 48, 32)}
"""Rows, channels in and out of the two products: 24 tokens with two experts each."""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "captures"


def rows_of(model, chosen, hidden):
    """What each product gets, row by row sorted by expert, and the rows of each expert."""
    experts = experts_of(model)
    order = chosen.flatten().argsort(stable=True)
    x = hidden[order // chosen.shape[1]]
    sizes = torch.bincount(chosen.flatten(), minlength=4)
    of_row = chosen.flatten()[order]
    inner = torch.stack([experts.gate_up_proj[e] @ row for e, row in zip(of_row, x, strict=True)])
    gate, up = inner.chunk(2, -1)
    return {"up": x, "down": torch.nn.functional.silu(gate) * up}, sizes


@pytest.mark.parametrize("patched", [False, True], ids=["unpatched", "patched"])
def test_rows_routing_and_weights_are_those_of_the_model(folder, patched):
    model = mixture("mixtral")
    if patched:
        sage_plugin.patch(model, kernel="sdpa", linears="int8_row", include="*experts")
    seen = []
    experts_of(model).register_forward_pre_hook(lambda _, args: seen.append(args[:2]))
    with record(model, folder, ops="grouped_linear", rows=5, min_seq=0, max_captures=8) as recorder:
        logits(model)
    captures = open_captures(folder, "grouped_linear")
    assert recorder.summary.calls_seen == 2 * 2 == len(captures.records)
    (hidden, chosen), *_ = seen
    with torch.no_grad():
        rows, sizes = rows_of(model, chosen, hidden)
    for which, own in (("up", "gate_up_proj"), ("down", "down_proj")):
        one = next(r for r in captures.records if r.layer == f"{LAYER}.{own}")
        shape = one.shape
        assert (shape.rows, shape.in_features, shape.out_features) == SHAPE[which]
        assert (shape.groups, one.rows) == (4, 5)
        got = captures.tensors(one)
        assert got["group_sizes"].tolist() == sizes.tolist()
        torch.testing.assert_close(got["x"], rows[which][[4, 14, 24, 33, 43]])
        weight = getattr(experts_of(model), own).detach()
        assert torch.equal(captures.weight(one), weight)
        assert one.weight_sha256 == weight_hash(weight)
        # the replay meets the weight of each row's own expert, and is timed with all routing
        replay = GROUPED.captured(captures, one, "cpu")
        exact = replay.exact(torch.arange(5)).out[0, 0]
        of_row = chosen.flatten().sort().values[[4, 14, 24, 33, 43]]
        expected = [weight[e].double() @ x.double() for e, x in zip(of_row, got["x"], strict=True)]
        torch.testing.assert_close(exact, torch.stack(expected).float())
        full = replay.full_size(one.shape)
        assert full.group_sizes.tolist() == sizes.tolist()
        assert full.x.shape == (48, shape.in_features)


def test_weights_that_do_not_fit_are_drawn_as_large_as_they_were(folder):
    model = mixture("mixtral")
    with torch.no_grad():
        experts_of(model).gate_up_proj[2] *= 50.0
    with record(
        model, folder, ops="grouped_linear", rows=5, min_seq=0, max_captures=4, max_bytes=80_000
    ):
        copied = copy.deepcopy(model)
        logits(model)
        logits(copied)  # which is not watched
    captures = open_captures(folder, "grouped_linear")
    one = next(r for r in captures.records if r.layer == f"{LAYER}.gate_up_proj")
    assert one.weight_file == ""
    drawn = GROUPED.captured(captures, one, "cpu").weight
    real = experts_of(model).gate_up_proj
    for group in range(4):
        assert float(drawn[group].std()) == pytest.approx(
            float(real[group].detach().std()), rel=0.1
        )


WRONG = {
    "groups": ('"groups":4', '"groups":5', "group_sizes is"),
    "no groups": ('"groups":4', '"groups":0', "no groups"),
    "rows": ('"rows":5', '"rows":6', "x is"),
}


@pytest.mark.parametrize("name", WRONG)
def test_lines_that_files_do_not_bear_out_are_left_out(folder, name):
    model = mixture("mixtral")
    with record(model, folder, ops="grouped_linear", rows=5, min_seq=0, max_captures=1):
        logits(model)
    right, wrong, words = WRONG[name]
    lines = (folder / MANIFEST).read_text()
    assert right in lines
    (folder / MANIFEST).write_text(lines.replace(right, wrong))
    with pytest.raises(CaptureError, match=words):
        open_captures(folder, "grouped_linear")
