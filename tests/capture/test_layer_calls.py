"""Calls by layer, shape and denoising step, as recordings of models write them."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_processor import Attention
from torch import nn

from sage_plugin.capture.recording.recorder import record
from sage_plugin.capture.recording.run_steps import RunSteps
from sage_plugin.capture.recording.tally import MAX_SHAPES, Tally
from sage_plugin.capture.store.manifest import CallCounts, LayerCalls
from sage_plugin.capture.store.reader import open_captures
from tests.capture.toys import LAYERS, Pipeline, denoise, shape, video_model


class Block(nn.Module):
    """A self-attention and, where there is text, a cross-attention."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attn1 = Attention(query_dim=8, heads=2, dim_head=4)
        self.attn2 = Attention(query_dim=8, heads=2, dim_head=4, cross_attention_dim=8)

    def forward(self, hidden_states, timestep=None, text=None):
        out = self.attn1(hidden_states)
        return out if text is None else self.attn2(out, encoder_hidden_states=text)


def run(model, timesteps, *, seq=6, text=None, batch=1, forwards=1):
    with torch.no_grad():
        for timestep in timesteps:
            for _ in range(forwards):
                time = None if timestep is None else torch.tensor(float(timestep))
                model(torch.ones(batch, seq, 8), timestep=time, text=text)


def rows(counts):
    """Calls at each step by layer and lengths."""
    shapes = [one.shape for one in counts.shapes]
    return {
        (row.layer, shapes[row.shape].seq_q, shapes[row.shape].seq_k): row.calls
        for row in counts.layer_calls
    }


@pytest.fixture
def recorded(tmp_path):
    """Record what a function does with a model or pipeline; the folder is read back."""

    def use(obj, act, **options):
        with record(obj, tmp_path / "captures", max_captures=50, **options):
            act()
        return open_captures(tmp_path / "captures")

    return use


def test_each_layer_has_its_calls_at_each_step(recorded):
    model = video_model()
    found = recorded(model, lambda: denoise(model, steps=4))
    counts = found.call_counts
    assert (counts.denoising_steps, counts.runs) == (4, 1)
    assert [row.calls for row in counts.layer_calls] == [(1, 1, 1, 1)] * LAYERS
    assert [row.layer for row in counts.layer_calls] == list(counts.layers)
    assert {row.shape for row in counts.layer_calls} == {0}
    assert counts.shapes[0].calls == sum(sum(row.calls) for row in counts.layer_calls)
    assert [r.denoising_step for r in found.records] == [s for s in range(4) for _ in range(LAYERS)]


def test_guidance_as_one_batch_or_as_two_forwards_has_the_same_steps(recorded, tmp_path):
    block = Block()
    one = recorded(block, lambda: run(block, [900, 500, 100], batch=2)).call_counts
    assert list(rows(one).values()) == [(1, 1, 1)]
    with record(block, tmp_path / "two", max_captures=50):
        run(block, [900, 500, 100], forwards=2)
    found = open_captures(tmp_path / "two")
    two = found.call_counts
    assert list(rows(two).values()) == [(2, 2, 2)]
    assert (one.denoising_steps, one.runs) == (two.denoising_steps, two.runs) == (3, 1)
    assert one.shapes[0].shape.batch == 2 * two.shapes[0].shape.batch
    assert [(r.step, r.denoising_step) for r in found.records] == [
        (0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2),
    ]  # fmt: skip


def test_two_denoisers_share_the_steps_of_a_run(recorded):
    pipe = Pipeline(transformer=Block(), transformer_2=Block())

    def act():
        run(pipe.transformer, [900, 700])
        run(pipe.transformer_2, [500, 300, 100])

    found = recorded(pipe, act)
    counts = found.call_counts
    assert (counts.denoising_steps, counts.runs) == (5, 1)
    assert rows(counts) == {
        ("transformer.attn1", 6, 6): (1, 1),
        ("transformer_2.attn1", 6, 6): (0, 0, 1, 1, 1),
    }
    later = [r for r in found.records if r.layer.startswith("transformer_2")]
    assert [(r.step, r.denoising_step) for r in later] == [(0, 2), (1, 3), (2, 4)]


def test_two_runs_in_one_recording_are_summed_by_step(recorded):
    block = Block()

    def act():
        run(block, [900, 500, 100])
        run(block, [900, 500, 100], seq=10)

    counts = recorded(block, act).call_counts
    assert (counts.denoising_steps, counts.runs) == (3, 2)
    assert sorted(rows(counts).values()) == [(1, 1, 1), (1, 1, 1)]
    assert {key[1] for key in rows(counts)} == {6, 10}


def test_a_model_without_timesteps_has_one_number_a_layer(recorded):
    block = Block()
    found = recorded(block, lambda: run(block, [None] * 3))
    assert (found.call_counts.denoising_steps, found.call_counts.runs) == (None, 0)
    assert list(rows(found.call_counts).values()) == [(3,)]
    assert {r.denoising_step for r in found.records} == {None}


def test_calls_too_short_to_be_saved_are_not_among_them(recorded):
    """As the steps of a language model that write a token."""
    block = Block()

    def act():
        run(block, [None], seq=8)
        run(block, [None] * 5, seq=1)

    counts = recorded(block, act).call_counts
    assert counts.total == 6
    assert {key[1:]: calls for key, calls in rows(counts).items()} == {(8, 8): (1,)}


def test_shapes_of_one_layer_are_told_apart(recorded):
    block = Block()
    counts = recorded(block, lambda: run(block, [900, 500], text=torch.ones(1, 3, 8))).call_counts
    assert {key[1:]: calls for key, calls in rows(counts).items()} == {
        (6, 6): (1, 1),
        (6, 3): (1, 1),
    }


def test_counts_survive_the_disk_and_older_ones_can_be_read():
    counts = CallCounts(
        layers={"a": 3}, denoising_steps=2, runs=1, layer_calls=(LayerCalls("a", 0, (1, 2)),)
    )
    assert CallCounts.from_json(counts.to_json()) == counts
    older = counts.to_json()
    for name in ("denoising_steps", "runs", "layer_calls"):
        del older[name]
    read = CallCounts.from_json(older)
    assert (read.denoising_steps, read.runs, read.layer_calls) == (None, 0, ())


def test_shapes_beyond_those_told_apart_are_in_no_cell():
    tally = Tally()
    for seq in range(1, MAX_SHAPES + 3):
        tally.add_shape(shape(seq_q=seq))
        tally.add_cell("a", shape(seq_q=seq), None)
    counts = tally.counts({}, RunSteps(), complete=True)
    assert len(counts.layer_calls) == len(counts.shapes) == MAX_SHAPES
    assert all(counts.shapes[row.shape].shape.seq_q <= MAX_SHAPES for row in counts.layer_calls)
    assert {row.calls for row in counts.layer_calls} == {(1,)}
