"""Paged attention on a device: every pair of a call's features as defined, graphs, no host read."""

from __future__ import annotations

import pytest
import torch

import sage_plugin
from sage_plugin.kernels.paged_attention.append import append_pages
from sage_plugin.kernels.paged_attention.dispatch import BITS
from tests.gpu.pairs import pairwise
from tests.kernels.paged_attention.problems import Problem, draw, error, tolerance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

BF16, FP8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
BATCHES = {
    "decode": ((700, 64, 1, 0, 333), (1, 1, 1, 1, 1)),
    "prefill": ((300,), (300,)),
    "chunk": ((900,), (130,)),
    "mixed": ((500, 200, 64, 90), (1, 200, 1, 33)),
}
EXTRAS = {
    "plain": {},
    "window": {"options": {"window": (70, 0)}},
    "cap": {"options": {"softcap": 3.0}},
    "sinks": {"sinks": True},
    "missing pages": {"missing": ((0, 1, -1),)},
    "padding": {"padding": 5},
}


@pairwise(
    batch=BATCHES,
    cache=[BF16, FP8, INT8],
    page=[16, 48, 64, 128, 256],
    heads=[(8, 2, 64), (8, 1, 128), (6, 2, 80), (4, 4, 256), (40, 1, 96)],
    extra=EXTRAS,
)
def test_as_defined_at_every_call(batch, cache, page, heads, extra):
    (lens, rows), (heads_q, heads_k, dim) = batch, heads
    problem = Problem(
        lens=lens, rows=rows, heads_q=heads_q, heads_k=heads_k, head_dim=dim, page=page, dtype=BF16,
        cache=None if cache == BF16 else cache, device="cuda", **extra,
    )  # fmt: skip
    drawn = draw(problem)
    for kernel in ("fav2", *(k for k, types in BITS.items() if cache in types)):
        limit = tolerance(problem, kernel)
        if kernel != "fav2":
            by = {**drawn.kwargs, "kernel": f"{kernel}:emulation"}
            limit = 1.2 * error(sage_plugin.paged_attention(*drawn.args, **by), drawn.out)
        for _ in range(3):  # as it is, recorded, replayed
            out, lse = sage_plugin.paged_attention(
                *drawn.args, **drawn.kwargs, kernel=kernel, return_lse=True
            )
            assert error(out, drawn.out) < limit, kernel
            assert torch.equal(lse.isneginf(), drawn.lse.isneginf())


@pytest.mark.parametrize("batch", BATCHES)
def test_a_cuda_graph_serves_other_lengths_and_pages(batch):
    lens, rows = BATCHES[batch]
    drawn = draw(Problem(lens=lens, rows=rows, dtype=BF16, device="cuda"))
    args = [x.nan_to_num() if x.is_floating_point() else x for x in drawn.args]
    for _ in range(3):
        sage_plugin.paged_attention(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sage_plugin.paged_attention(*args)
    args[4].copy_(torch.tensor([max(0, n - 17) for n in lens]))
    args[3].copy_(args[3].flip(0))
    graph.replay()
    assert torch.equal(out, sage_plugin.paged_attention(*args))


def test_nothing_waits_for_the_device():
    drawn = draw(Problem(lens=(700, 64), rows=(1, 30), dtype=BF16, device="cuda"))
    new = torch.randn(2, 31, 2, 64, device="cuda", dtype=BF16)
    caches = [x.nan_to_num() for x in drawn.args[1:3]]
    calls = (
        lambda: sage_plugin.paged_attention(*drawn.args),
        lambda: append_pages(*new, *caches, *drawn.args[3:]),
    )
    for call in calls:
        call()
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("cache", [BF16, FP8, INT8])
def test_pages_are_written_as_by_the_emulation(cache):
    rng = torch.Generator("cuda").manual_seed(0)

    def drawn(*size):
        return torch.randn(size, generator=rng, device="cuda")

    new, held = drawn(2, 27, 2, 64).to(BF16), (drawn(2, 9, 16, 2, 64) * 20).to(cache)
    scales = drawn(2, 9, 2).abs() * 0.02 + 0.01
    table = torch.tensor([[3, 0, 7], [5, -1, -1], [-1, -1, -1], [99, -1, -1]], device="cuda")
    lens, ends = (torch.tensor(x, device="cuda") for x in ((37, 16, 0, 5), (0, 21, 22, 22, 27)))
    found = []
    for backend in ("emulation", "triton"):
        caches, units = held.clone(), scales.clone()
        given = {} if cache == BF16 else {"k_scale": units[0], "v_scale": units[1]}
        append_pages(*new, *caches, table, lens, ends, **given, backend=backend)
        found.append((caches.float(), units))
    torch.testing.assert_close(found[0][1], found[1][1])
    difference = (found[0][0] - found[1][0]).abs()
    # one step of the type where a quotient lies between two numbers
    assert (difference <= {BF16: 0, INT8: 1}.get(cache, found[0][0].abs() / 7 + 0.01)).all()
    assert (difference > 0).float().mean() < 0.01
