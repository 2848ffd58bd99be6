"""Patched attention on a device, eager and compiled; needs no host library."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.support import fewest_operations, kernels_of
from sage_plugin.plugin.patch import patch
from tests.plugin.toys import Direct, Dispatching, ToyAttention, qkv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no device"),
]


@pytest.mark.parametrize("processor", [Direct, Dispatching])
@pytest.mark.parametrize("kernel", ["fav3_sage", "sage", "fav2"])
def test_a_patched_layer_runs_on_the_device_eager_and_compiled(processor, kernel):
    if kernel not in kernels_of(dispatch.facts_of("cuda", 0)):
        pytest.skip(f"{kernel} does not run here")
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
    assert label.split(":")[0] == kernel
    assert label.split(":")[1] in ("portable", "hopper")


def test_auto_takes_bool_masks_and_leaves_added_ones_and_small_calls_to_the_host():
    layer = ToyAttention(Direct())
    handle = patch(layer, min_seq=0)
    small = [x.cuda().half() for x in qkv(seq=300, dim=64)]
    if fewest_operations(dispatch.facts_of("cuda", 0).arch, 64):
        assert torch.equal(layer(*small), F.scaled_dot_product_attention(*small))
        assert handle.report().kernel_calls() == 0
    q, k, v = (x.cuda().half() for x in qkv(heads=8, seq=6500, dim=64))
    hidden = torch.rand(6500, 6500, device="cuda") > 0.2
    before = handle.report().kernel_calls()
    for mask, calls in ((hidden.half(), 0), (hidden, 1), (hidden[:1], 2), (None, 3)):
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = layer(q, k, v, attn_mask=mask)
        assert (out - expected).abs().sum() < 0.08 * expected.abs().sum()
        assert handle.report().kernel_calls() - before == calls
