"""On a device: copies are made before the model goes on, and CUDA graphs are left alone."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from sage_plugin.capture.ops.paged_attention import PagedAttentionOp, PagedEvent
from sage_plugin.capture.recording.intake import GRAPH_CAPTURE, Intake
from sage_plugin.capture.selection.options import CaptureOptions
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.kernels.paged_attention.call import PagedCall
from sage_plugin.plugin.steps.forward import Forward, Timestep
from tests.capture.toys import event

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device"),
]
LAYER = "transformer.blocks.0.attn1"


@pytest.fixture
def intake(tmp_path) -> Intake:
    taken = Intake(tmp_path / "captures", CaptureOptions(heads=(0, 2)))
    taken.add_layers("attention", [LAYER])
    taken.open()
    return taken


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_a_call_that_the_model_overwrites_at_once(intake, tmp_path, dtype):
    packed = torch.randn(2, 300, 3, 4, 64, device="cuda").to(dtype)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    expected = [t[:, [0, 2]].float().cpu() for t in (q, k, v)]
    assert intake.take(Forward(nn.Linear(1, 1), 0, Timestep(None)), event(q, k, v, layer=LAYER))
    packed.view(torch.uint8).zero_()
    intake.close({})
    captures = open_captures(tmp_path / "captures")
    call = captures.load(captures.records[0], device="cuda")
    assert call.q.is_cuda
    for saved, original in zip((call.q, call.k, call.v), expected, strict=True):
        assert torch.equal(saved.float().cpu(), original)


def test_calls_inside_a_graph_capture_are_skipped_with_one_warning(intake, caplog):
    """G3: a synchronising copy would break the graph."""
    watch, q = Forward(nn.Linear(1, 1), 0, Timestep(None)), torch.randn(1, 4, 64, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with caplog.at_level(logging.WARNING), torch.cuda.graph(graph):
        taken = [intake.take(watch, event(q, layer=LAYER)) for _ in range(2)]
        out = q + 1
    graph.replay()
    assert taken == [False, False]
    assert torch.equal(out, q + 1)
    assert intake.summary({}).skipped == {GRAPH_CAPTURE: 2}
    assert len(caplog.records) == 1


def test_lengths_are_not_read_inside_a_graph_capture():
    lens = torch.tensor([20, 33], dtype=torch.int32, device="cuda")
    call = PagedCall(
        torch.randn(2, 4, 64, device="cuda"), *torch.randn(2, 5, 16, 2, 64, device="cuda"),
        torch.tensor([[1, 3, -1], [0, 2, 4]], dtype=torch.int32, device="cuda"), lens,
        torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda"),
    )  # fmt: skip
    op, seen = PagedAttentionOp(), PagedEvent("model", "model.paged_attention", 0, call)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        said = op.canonical(seen)
        lens + 1
    assert said == GRAPH_CAPTURE
    assert op.canonical(seen).shape.kv_lens == (20, 33)
