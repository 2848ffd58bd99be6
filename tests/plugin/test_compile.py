"""Patched models under `torch.compile`: whole graphs, one for equal blocks, no stale ones."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")

from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_plugin.plugin.component import Component
from sage_plugin.plugin.patch import patch, unpatch
from tests.plugin.tiny import random, tiny
from tests.plugin.toys import Direct, ToyAttention, qkv, sage

pytestmark = pytest.mark.usefixtures("no_graphs")


@pytest.mark.parametrize("kernel", ["sdpa", "sage"])
@pytest.mark.parametrize("name", ["cogx", "wan"])
def test_report_73_a_patched_model_compiles_as_one_graph(name, kernel):
    model = tiny(name)
    host = model.run()
    handle = patch(model.module, kernel=kernel, min_seq=0)
    eager, calls = model.run(), handle.report().total_calls()
    counter = CompileCounter()
    compiled = model.run(torch.compile(model.module, backend=counter, fullgraph=True))
    assert counter.frame_count == 1
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-6)
    assert torch.equal(compiled, host) == (kernel == "sdpa")
    assert handle.report().total_calls() == calls  # nothing is counted in a graph


def test_report_103_patch_after_compile_and_back():
    model = tiny("cogx")
    counter = CompileCounter()
    compiled = torch.compile(model.module, backend=counter, fullgraph=True)
    host = model.run(compiled)
    handle = patch(compiled, kernel="sage", min_seq=0)
    assert next(iter(handle.layers)) == "transformer.transformer_blocks.0.attn1"
    eager = model.run()
    assert not torch.equal(eager, host)
    torch.testing.assert_close(model.run(compiled), eager, rtol=0, atol=1e-6)
    assert counter.frame_count == 2
    unpatch(compiled)
    torch.testing.assert_close(model.run(compiled), host, rtol=0, atol=1e-6)
    patch(compiled, kernel="sage", min_seq=0)
    torch.testing.assert_close(model.run(compiled), eager, rtol=0, atol=1e-6)
    assert counter.frame_count == 2  # the second patch finds the graph of the first
    patch(compiled, kernel="sdpa", min_seq=0)
    torch.testing.assert_close(model.run(compiled), host, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernel", ["sdpa", "sage"])
def test_twelve_blocks_share_one_graph(kernel):
    model = tiny("wan12")
    patch(model.module, kernel=kernel, min_seq=0)
    eager = model.run()
    counter = CompileCounter()
    model.module.compile_repeated_blocks(fullgraph=True, backend=counter)
    torch.testing.assert_close(model.run(), eager, rtol=0, atol=1e-6)
    assert counter.frame_count == 1


def test_report_75_dynamic_lengths_share_one_graph():
    model = tiny("wan")
    patch(model.module, kernel="sage", min_seq=0)
    counter = CompileCounter()
    compiled = torch.compile(model.module, backend=counter, fullgraph=True, dynamic=True)
    for size in (8, 12, 16):
        latents = random(2, 4, 3, size, size)
        eager = model.run(hidden_states=latents)
        torch.testing.assert_close(
            model.run(compiled, hidden_states=latents), eager, rtol=0, atol=1e-6
        )
    assert counter.frame_count == 1


def test_the_hook_does_nothing_in_a_graph(monkeypatch):
    checks = []
    monkeypatch.setattr(Component, "check", lambda self: checks.append(1))
    layer = ToyAttention(Direct())
    patch(layer, kernel="sage", min_seq=0)
    torch.compile(layer, backend="eager", fullgraph=True)(*qkv())
    assert checks == []
    layer(*qkv())
    assert checks == [1]


def test_short_calls_and_auto_stay_with_the_host_in_a_graph():
    model = tiny("wan")
    host = model.run()
    compiled = torch.compile(model.module, backend=CompileCounter(), fullgraph=True)
    for options in ({"kernel": "sage", "min_seq": 1000}, {"kernel": "auto", "min_seq": 0}):
        patch(model.module, **options)
        torch.testing.assert_close(model.run(compiled), host, rtol=0, atol=1e-6)


def test_report_95_gradients_flow_in_a_graph():
    layer = ToyAttention(Direct())
    patch(layer, kernel="sage", min_seq=0)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    grads = []
    for function in (compiled, lambda q, k, v: Direct()(None, q, k, v)):
        q, k, v = (x.requires_grad_() for x in qkv())
        function(q, k, v).square().sum().backward()
        grads.append([x.grad for x in (q, k, v)])
    for ours, host in zip(*grads, strict=True):
        torch.testing.assert_close(ours, host, rtol=0, atol=1e-5)
    with torch.no_grad():
        assert not torch.equal(compiled(*qkv()), Direct()(None, *qkv()))


def test_autocast_in_a_graph():
    model = tiny("cogx")
    patch(model.module, kernel="sage", min_seq=0)
    compiled = torch.compile(model.module, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model.run(compiled), model.run(), rtol=0, atol=1e-6)


def test_report_130_a_tangent_flows_in_a_graph():
    layer = ToyAttention(Direct())
    sage(layer)
    q, k, v = qkv()

    def tangent(q, direction):
        return torch.func.jvp(lambda q: layer(q, k, v), (q,), (direction,))[1]

    compiled = torch.compile(tangent, backend="eager")
    with sdpa_kernel(SDPBackend.MATH):
        host = torch.func.jvp(lambda q: Direct()(None, q, k, v), (q,), (v,))[1]
        torch.testing.assert_close(compiled(q, v), host, rtol=0, atol=1e-5)
    assert host.any()


@pytest.mark.parametrize("strict", [True, False])
def test_report_134_an_export_has_our_op(strict):
    layer = ToyAttention(Direct())
    sage(layer)
    eager = layer(*qkv())
    program = torch.export.export(layer, qkv(), strict=strict)
    ops = [str(node.target) for node in program.graph.nodes if "attention" in str(node.target)]
    assert ops == ["sage_plugin.attention.default"]
    assert torch.equal(program.module()(*qkv()), eager)


def test_report_134_an_export_of_the_host_s_attention_says_why(caplog):
    layer = ToyAttention(Direct())
    handle = sage(layer)
    q, k, v = qkv()
    for _ in range(2):
        torch.export.export(layer, (q.requires_grad_(), k, v), strict=False)
    assert sum("a gradient is needed" in record.message for record in caplog.records) == 1
    assert handle.report().total_calls() == 0


def test_blocks_compiled_in_place_keep_plain_names():
    model = tiny("cogx")
    blocks = model.module.transformer_blocks
    blocks[0] = torch.compile(blocks[0], backend="eager", fullgraph=True)
    host = model.run()
    handle = patch(model.module, kernel="sage", min_seq=0)
    assert list(handle.layers) == [f"transformer.transformer_blocks.{i}.attn1" for i in (0, 1)]
    assert not torch.equal(model.run(), host)
    assert [row.total_calls() for row in handle.report().rows] == [0, 1]
    unpatch(model.module)
    torch.testing.assert_close(model.run(), host, rtol=0, atol=1e-6)


@pytest.mark.parametrize("lengths", ["one", "two"])
def test_lengths_that_follow_from_data_are_compared_where_a_graph_can(lengths):
    """As in Framepack, whose text is cut to its mask: what cannot be told is left to the host."""
    layer = ToyAttention(Direct())
    q, k, v = qkv()
    keep = torch.ones(q.shape[2], dtype=torch.bool)
    keep[5:9] = False
    other = keep if lengths == "one" else keep.clone()

    def cut(q, k, v, keep, other):
        return layer(q[:, :, :4], k[:, :, keep], v[:, :, other if lengths == "two" else keep])

    host = cut(q, k, v, keep, other)
    patch(layer, kernel="sage", min_seq=0)
    eager = cut(q, k, v, keep, other)
    assert not torch.equal(eager, host)
    counter = CompileCounter()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(cut, backend=counter, fullgraph=True)
        if lengths == "two":  # torch's own attention compares them too
            with pytest.raises(torch._dynamo.exc.UserError, match="scaled_dot_product_attention"):
                compiled(q, k, v, keep, other)
            return
        found = compiled(q, k, v, keep, other)
    assert counter.frame_count == 1
    torch.testing.assert_close(found, eager, rtol=0, atol=1e-6)
