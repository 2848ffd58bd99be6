"""Every kernel's variants on a device, against the oracle and its own emulation."""

from __future__ import annotations

import pytest
import torch

import sage_plugin
from sage_plugin.kernels.attention.oracle import oracle
from tests.gpu.pairs import pairwise
from tests.gpu.variants import PAIRS, config_of, each, poison, skip_what_is_left
from tests.kernels.calls import relative_l1

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

QUANTIZED = [(kernel, variant) for kernel, variant in PAIRS if kernel != "fav2"]
SHAPES = [
    # batch, heads_q, heads_k, seq_q, seq_k, head_dim
    (2, 4, 4, 1024, 1024, 64),
    (1, 8, 2, 300, 777, 128),
    (1, 2, 2, 777, 300, 64),
    (1, 3, 1, 129, 1, 128),
    (1, 2, 2, 1, 500, 64),
    (2, 2, 2, 255, 257, 40),
    (1, 2, 1, 200, 333, 96),
    (2, 2, 1, 400, 640, 80),
    (1, 2, 2, 193, 385, 33),
    (1, 1, 1, 130, 191, 256),
]


def inputs(shape, dtype, layout="bhsd", seed=0):
    batch, heads_q, heads_k, seq_q, seq_k, dim = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(heads, seq):
        size = (batch, heads, seq, dim) if layout == "bhsd" else (batch, seq, heads, dim)
        return torch.randn(size, generator=generator, device="cuda")

    q, k, v = draw(heads_q, seq_q), draw(heads_k, seq_k) + 2.0, draw(heads_k, seq_k) + 0.5
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pairwise(pair=PAIRS, shape={str(shape): shape for shape in SHAPES},
          causal={"full": False, "causal": True},
          dtype=[torch.float16, torch.bfloat16, torch.float32])  # fmt: skip
def test_matches_emulation(pair, shape, causal, dtype):
    kernel, variant = pair
    skip_what_is_left(kernel, variant, shape[-1])
    q, k, v = inputs(shape, dtype)
    before = [t.clone() for t in (q, k, v)]
    poison(q)
    options = {
        "kernel": kernel,
        "is_causal": causal,
        "return_lse": True,
        "out_dtype": torch.float32,
        "launch": config_of(kernel, variant, q, k, v, causal=causal),
    }
    out, lse = sage_plugin.attention(q, k, v, variant=variant, **options)
    twin, twin_lse = sage_plugin.attention(q, k, v, variant="emulation", **options)
    exact, exact_lse = oracle(q, k, v, is_causal=causal)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), before, strict=True))
    assert torch.isfinite(out).all()
    assert relative_l1(out, exact) <= 1.2 * relative_l1(twin, exact) + 2e-4
    dead = torch.isinf(exact_lse)
    assert torch.equal(torch.isinf(lse), dead)
    assert (out[dead] == 0).all()
    if not dead.all():
        # One row's LSE moves with each weight that rounds the other way.
        limit = 1.5 * (twin_lse - exact_lse)[~dead].abs().max().item()
        limit += 2e-3 if q.shape[2] > 1 else 1e-2
        assert (lse - exact_lse)[~dead].abs().max().item() <= limit


@each()
def test_many_heads_pass_the_grid_limit(kernel, variant):
    skip_what_is_left(kernel, variant, 64)
    q, k, v = inputs((70000, 1, 1, 16, 16, 64), torch.float16)
    out = sage_plugin.attention(q, k, v, kernel=kernel, variant=variant, out_dtype=torch.float32)
    exact, _ = oracle(q[-64:], k[-64:], v[-64:])
    assert relative_l1(out[-64:], exact) < 0.03


@each()
def test_report_76_graph_replay_sees_changed_inputs(kernel, variant):
    skip_what_is_left(kernel, variant, 64)
    q, k, v = inputs((1, 2, 2, 512, 512, 64), torch.float16)
    sage_plugin.attention(q, k, v, kernel=kernel, variant=variant)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sage_plugin.attention(q, k, v, kernel=kernel, variant=variant)
    for tensor in (q, k, v):
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, sage_plugin.attention(q, k, v, kernel=kernel, variant=variant))


@each()
def test_report_52_repeated_calls_are_bitwise_equal(kernel, variant):
    skip_what_is_left(kernel, variant, 64)
    q, k, v = inputs((1, 2, 2, 777, 777, 128), torch.bfloat16)
    first = sage_plugin.attention(q, k, v, kernel=kernel, variant=variant)
    for _ in range(20):
        poison(q)
        assert torch.equal(sage_plugin.attention(q, k, v, kernel=kernel, variant=variant), first)


@each()
@pytest.mark.parametrize("shape", [(1, 3, 1, 129, 1, 128), (1, 2, 2, 777, 300, 128)], ids=str)
def test_short_causal_calls_never_show_what_scratch_held(kernel, variant, shape):
    skip_what_is_left(kernel, variant, 64)
    for seed in range(150):
        q, k, v = inputs(shape, torch.bfloat16, seed=seed)
        poison(q)
        out = sage_plugin.attention(
            q, k, v, kernel=kernel, variant=variant, is_causal=True, out_dtype=torch.float32
        )
        assert torch.isfinite(out).all()
