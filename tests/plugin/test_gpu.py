"""Patched attention on a device, eager and compiled; needs no host library."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sage_plugin.plugin.patch import patch
from tests.plugin.toys import Direct, Dispatching, ToyAttention, qkv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no device"),
]


@pytest.mark.parametrize("processor", [Direct, Dispatching])
@pytest.mark.parametrize("kernel", ["auto", "sage", "fav2"])
def test_a_patched_layer_runs_on_the_device_eager_and_compiled(processor, kernel):
    layer = ToyAttention(processor())
    handle = patch(layer, kernel=kernel, min_seq=256)
    q, k, v = (x.cuda() for x in qkv(seq=300, dim=64, dtype=torch.bfloat16))
    exact = F.scaled_dot_product_attention(q, k, v)
    torch._dynamo.reset()
    eager = layer(q, k, v)
    compiled = torch.compile(layer, fullgraph=True)(q, k, v)
    error = (eager - exact).abs().sum() / exact.abs().sum()
    assert error < 0.08
    assert torch.equal(compiled, eager)
    (row,) = handle.report().rows
    (label,) = row.calls
    assert label.endswith(":portable")
    assert kernel in ("auto", label.split(":")[0])


def test_auto_takes_key_masks_and_leaves_dense_ones_and_short_calls_to_the_host():
    layer = ToyAttention(Direct())
    handle = patch(layer)
    q, k, v = (x.cuda().half() for x in qkv(seq=300, dim=64))
    mask = torch.rand(300, 300, device="cuda") > 0.2
    assert torch.equal(layer(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert handle.report().kernel_calls() == 0
    patch(layer, min_seq=0)
    for some, calls in ((mask, 0), (mask[:1], 1)):
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=some)
        out = layer(q, k, v, attn_mask=some)
        assert (out - expected).abs().sum() < 0.08 * expected.abs().sum()
        assert (out - F.scaled_dot_product_attention(q, k, v)).abs().sum() > 0.2 * out.abs().sum()
        assert handle.report().kernel_calls() == calls
    assert handle.report().total_calls() == 3
