"""Every kernel's portable variant on a device, against the oracle and its own emulation."""

from __future__ import annotations

import math

import pytest
import torch

import sage_plugin
from sage_plugin.kernels.oracle import oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

KERNELS = ("fav2", "sage", "fav3_sage", "fav3_fp8")
SHAPES = [
    # batch, heads_q, heads_k, seq_q, seq_k, head_dim
    (2, 4, 4, 1024, 1024, 64),
    (1, 8, 2, 300, 777, 128),
    (1, 2, 2, 777, 300, 64),
    (1, 3, 1, 129, 1, 128),
    (1, 2, 2, 1, 500, 64),
    (2, 2, 2, 255, 257, 40),
    (1, 2, 1, 200, 333, 96),
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


def poison(like):
    """Leave NaN where the allocator will look next, in blocks of every size up to a call's."""
    held = []
    for size in (256, 4096, 65536, like.numel(), 2 * like.numel()):
        held += [torch.full((size,), float("nan"), device="cuda") for _ in range(4)]
    del held


def relative(out, reference):
    return ((out.double() - reference.double()).abs().sum() / reference.double().abs().sum()).item()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_matches_emulation(kernel, shape, causal, dtype):
    q, k, v = inputs(shape, dtype)
    before = [t.clone() for t in (q, k, v)]
    poison(q)
    options = {
        "kernel": kernel,
        "is_causal": causal,
        "return_lse": True,
        "out_dtype": torch.float32,
    }
    out, lse = sage_plugin.attention(q, k, v, **options)
    twin, twin_lse = sage_plugin.attention(q, k, v, variant="emulation", **options)
    exact, exact_lse = oracle(q, k, v, is_causal=causal)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), before, strict=True))
    assert torch.isfinite(out).all()
    assert relative(out, exact) <= 1.2 * relative(twin, exact) + 2e-4
    dead = torch.isinf(exact_lse)
    assert torch.equal(torch.isinf(lse), dead)
    assert (out[dead] == 0).all()
    if not dead.all():
        limit = 1.5 * (twin_lse - exact_lse)[~dead].abs().max().item() + 2e-3
        assert (lse - exact_lse)[~dead].abs().max().item() <= limit


@pytest.mark.parametrize("kernel", KERNELS)
def test_layouts_and_views_give_the_same_bits(kernel):
    batch, heads, seq, dim = 2, 3, 700, 64
    qkv = torch.randn(batch, seq, 3, heads, dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.unbind(2)
    plain = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    expected = sage_plugin.attention(*plain, kernel=kernel)
    views = [t.transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(sage_plugin.attention(*views, kernel=kernel), expected)
    bshd = sage_plugin.attention(q, k, v, kernel=kernel, layout="bshd")
    assert torch.equal(bshd.transpose(1, 2), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_two_halves_of_k_merge_to_the_whole(kernel):
    q, k, v = inputs((1, 4, 2, 300, 600, 64), torch.float16)
    options = {"kernel": kernel, "return_lse": True, "out_dtype": torch.float32}
    whole, lse = sage_plugin.attention(q, k + 20, v, **options)
    first, second = (
        sage_plugin.attention(q, k[:, :, part] + 20, v[:, :, part], **options)
        for part in (slice(0, 300), slice(300, 600))
    )
    total = torch.logaddexp(first[1], second[1])
    merged = sum(o * torch.exp(s - total)[..., None] for o, s in (first, second))
    assert relative(merged, whole) < 0.03
    assert (total - lse).abs().max().item() < 0.15


@pytest.mark.parametrize("kernel", ["sage", "fav3_sage", "fav3_fp8"])
def test_report_57_gain_does_not_fall_with_length(kernel):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, 1, 65536, 64, device="cuda", generator=generator) for _ in range(3))
    q = q[:, :, :512]
    v = 1.0 + 0.1 * v
    out = sage_plugin.attention(
        q.half(), k.half(), v.half(), kernel=kernel, out_dtype=torch.float32
    )
    exact, _ = oracle(q, k, v)
    assert math.isclose(out.mean().item() / exact.mean().item(), 1.0, abs_tol=0.003)


def test_report_46_bf16_values_beyond_fp16_stay_finite_and_right():
    q, k, _ = inputs((1, 2, 2, 256, 256, 64), torch.bfloat16)
    for value in (7e4, 1e5, 3e6):
        v = torch.full_like(k, value)
        for kernel in KERNELS:
            out = sage_plugin.attention(q, k, v, kernel=kernel, out_dtype=torch.float32)
            assert relative(out, torch.full_like(out, v.float().mean().item())) < 5e-3


@pytest.mark.parametrize("kernel", KERNELS)
def test_many_heads_pass_the_grid_limit(kernel):
    q, k, v = inputs((70000, 1, 1, 16, 16, 64), torch.float16)
    out = sage_plugin.attention(q, k, v, kernel=kernel, out_dtype=torch.float32)
    exact, _ = oracle(q[-64:], k[-64:], v[-64:])
    assert relative(out[-64:], exact) < 0.03


@pytest.mark.parametrize("kernel", KERNELS)
def test_report_76_graph_replay_sees_changed_inputs(kernel):
    q, k, v = inputs((1, 2, 2, 512, 512, 64), torch.float16)
    sage_plugin.attention(q, k, v, kernel=kernel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sage_plugin.attention(q, k, v, kernel=kernel)
    for tensor in (q, k, v):
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, sage_plugin.attention(q, k, v, kernel=kernel))


@pytest.mark.parametrize("kernel", KERNELS)
def test_report_52_repeated_calls_are_bitwise_equal(kernel):
    q, k, v = inputs((1, 2, 2, 777, 777, 128), torch.bfloat16)
    first = sage_plugin.attention(q, k, v, kernel=kernel)
    for _ in range(20):
        poison(q)
        assert torch.equal(sage_plugin.attention(q, k, v, kernel=kernel), first)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(1, 3, 1, 129, 1, 128), (1, 2, 2, 777, 300, 128)], ids=str)
def test_short_causal_calls_never_show_what_scratch_held(kernel, shape):
    for seed in range(150):
        q, k, v = inputs(shape, torch.bfloat16, seed=seed)
        poison(q)
        out = sage_plugin.attention(q, k, v, kernel=kernel, is_causal=True, out_dtype=torch.float32)
        assert torch.isfinite(out).all()
