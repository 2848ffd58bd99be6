"""Patched linears under `torch.compile`: whole graphs, one for equal blocks, no stale weights."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")

from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import sage_plugin
from tests.plugin.tiny import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
PATCH = {"kernel": "sdpa", "linears": "int8_row", "min_seq": 0}


def close(out: torch.Tensor, expected: torch.Tensor) -> bool:
    """Torch's own FP8 products round their outputs to bf16, which the emulation does not."""
    return float((out - expected).norm() / expected.norm()) < 0.01


@pytest.fixture(autouse=True)
def _no_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "kernel"), [("cogx", "fp8_row"), ("flux", "int8_row")])
def test_a_patched_model_is_one_graph_for_all_steps(name, kernel):
    model = tiny(name)
    plain = model.run()
    handle = sage_plugin.patch(model.module, **{**PATCH, "linears": kernel})
    eager = model.run()
    calls = [row.calls for row in handle.report().linears]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model.module, backend=counter, fullgraph=True)
    for step in (1.0, 0.5, 0.25):
        inputs = {"timestep": torch.full_like(model.inputs["timestep"], step)}
        out, again = model.run(compiled, **inputs), model.run(**inputs)
        assert close(out, again)
    assert counter.frame_count == 1
    assert not torch.equal(eager, plain)
    assert [row.calls for row in handle.report().linears] != calls  # those of the eager model
    handle.unpatch()
    torch.testing.assert_close(model.run(compiled), plain, rtol=0, atol=1e-5)


def test_twelve_blocks_share_one_graph_with_linears():
    model = tiny("wan12")
    handle = sage_plugin.patch(model.module, **PATCH)
    eager = model.run()
    counter = CompileCounter()
    model.module.compile_repeated_blocks(fullgraph=True, backend=counter)
    out = model.run()
    assert counter.frame_count == 1
    assert close(out, eager)
    assert len(handle.report().linears) == 120


def test_inductor_takes_a_patched_block():
    model = tiny("cogx")
    sage_plugin.patch(model.module, **PATCH)
    eager = model.run()
    model.module.transformer_blocks[0].compile(fullgraph=True)
    assert close(model.run(), eager)


def test_a_weight_that_is_written_reaches_graphs():
    model = tiny("cogx")
    sage_plugin.patch(model.module, **PATCH)
    counter = CompileCounter()
    for block in model.module.transformer_blocks:
        block.compile(fullgraph=True, backend=counter)
    before, graphs = model.run(), counter.frame_count
    query = model.module.transformer_blocks[1].attn1.to_q
    query.weight.data *= 3.0
    after = model.run()  # the model's own forward is eager: its weights are looked after
    assert counter.frame_count == graphs
    assert float((after - before).norm() / before.norm()) > 0.005
    torch._dynamo.reset()
    for block in model.module.transformer_blocks:
        block._compiled_call_impl = None
    assert close(model.run(), after)


def test_a_graph_of_the_whole_model_has_what_was_written_until_it_is_refreshed():
    model = tiny("cogx")
    sage_plugin.patch(model.module, **PATCH)
    counter = CompileCounter()
    compiled = torch.compile(model.module, backend=counter, fullgraph=True)
    before = model.run(compiled)
    query = model.module.transformer_blocks[1].attn1.to_q
    query.weight.data *= 3.0
    after = model.run(compiled)
    assert float((after - before).norm() / before.norm()) > 0.005
    assert not query._sage_linear.ready
    sage_plugin.refresh(model.module)
    assert query._sage_linear.ready
    assert close(model.run(compiled), after)
    assert counter.frame_count == 2


def test_lengths_may_be_dynamic():
    model = tiny("wan")
    sage_plugin.patch(model.module, **PATCH)
    counter = CompileCounter()
    compiled = torch.compile(model.module, backend=counter, fullgraph=True, dynamic=True)
    for size in (8, 12, 16):
        latents = torch.randn(2, 4, 3, size, size)
        eager = model.run(hidden_states=latents)
        out = model.run(compiled, hidden_states=latents)
        assert close(out, eager)
    assert counter.frame_count == 1


def test_a_graph_that_needs_a_freed_weight_says_so():
    model = tiny("cogx")
    sage_plugin.patch(model.module, **PATCH, keep_originals=False)
    compiled = torch.compile(model.module, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"or was freed: run it under torch\.no_grad\(\)"):
        compiled(**model.inputs)
