"""On a device: a call from its launch graph is the call, to the bit, wherever its tensors lie."""

from __future__ import annotations

import pytest
import torch

import sage_plugin
from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.attention import executor
from sage_plugin.kernels.launch_config import forget
from tests.gpu.pairs import pairwise
from tests.gpu.variants import PAIRS, each, skip_what_is_left

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

MASKS = ("none", "padding", "bias", "rows")


@pytest.fixture
def relaunched(monkeypatch):
    """Names of what is launched from a launch graph."""
    names: list[str] = []
    stock = launch_graph.relaunch

    def relaunch(one, stream, arguments):
        names.append(one.name)
        stock(one, stream, arguments)

    monkeypatch.setattr(launch_graph, "relaunch", relaunch)
    forget()
    return names


def drawn(seed, heads_k=4, seq=700, dim=64, device="cuda", dtype=torch.bfloat16):
    generator = torch.Generator(device).manual_seed(seed)
    return [
        torch.randn(1, heads, seq, dim, generator=generator, device=device, dtype=dtype) + seed
        for heads in (4, heads_k, heads_k)
    ]


def masked(kind, seed, seq=700):
    generator = torch.Generator("cuda").manual_seed(seed)
    if kind == "none":
        return None
    if kind == "bias":
        return torch.randn(1, 1, 1, seq, generator=generator, device="cuda")
    rows = 1 if kind == "padding" else seq
    return torch.rand(1, 1, rows, seq, generator=generator, device="cuda") < 0.7


def attended(tensors, mask=None, **options):
    return sage_plugin.attention(*tensors, mask, return_lse=True, **options)


@pairwise(pair=PAIRS, dim=[64, 96, 128], heads_k=[4, 2], mask=MASKS)
def test_a_repeated_call_is_the_call(pair, dim, heads_k, mask, relaunched):
    kernel, variant = pair
    skip_what_is_left(kernel, variant, dim, mask_kind={"none": "none", "rows": "dense"}.get(
        mask, "key_bias"))  # fmt: skip
    options = {"kernel": kernel, "variant": variant, "is_causal": heads_k == 2}
    calls = [(drawn(s, heads_k, dim=dim), masked(mask, s)) for s in range(4)]
    first = []
    for tensors, bias in calls:
        forget()
        first.append(attended(tensors, bias, **options))
    assert relaunched == []
    forget()
    for _ in range(2):
        attended(*calls[0], **options)
    held = []
    for (tensors, bias), (right, right_lse) in zip(calls, first, strict=True):
        before = len(relaunched)
        out, lse = attended(tensors, bias, **options)
        held += [out, lse, torch.empty(12345, device="cuda")]  # the next workspace lies elsewhere
        assert len(relaunched) > before
        assert torch.equal(out, right)
        assert torch.equal(lse, right_lse)


@each()
def test_a_repeated_long_call_is_the_call(kernel, variant, relaunched):
    skip_what_is_left(kernel, variant, 128)
    calls = [drawn(s, seq=9000, dim=128) for s in range(3)]
    forget()
    right = attended(calls[2], kernel=kernel, variant=variant)
    forget()
    for tensors in calls:
        out, lse = attended(tensors, kernel=kernel, variant=variant)
    assert relaunched
    assert torch.equal(out, right[0])
    assert torch.equal(lse, right[1])


@each()
def test_a_graph_of_a_repeated_call_sees_new_inputs(kernel, variant, relaunched):
    skip_what_is_left(kernel, variant, 64)
    static, other = drawn(0), drawn(1)
    for _ in range(3):
        attended(static, kernel=kernel, variant=variant)
    graph = torch.cuda.CUDAGraph()
    relaunched.clear()
    with torch.cuda.graph(graph):
        out, _ = attended(static, kernel=kernel, variant=variant)
    assert relaunched
    for place, value in zip(static, other, strict=True):
        place.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    forget()
    assert torch.equal(out, attended(other, kernel=kernel, variant=variant)[0])


@each()
def test_a_repeated_call_runs_on_the_stream_of_its_caller(kernel, variant, relaunched):
    skip_what_is_left(kernel, variant, 64)
    tensors, other = drawn(0), drawn(1)
    right = attended(other, kernel=kernel, variant=variant)[0]
    for _ in range(3):
        attended(tensors, kernel=kernel, variant=variant)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for place, value in zip(tensors, other, strict=True):
            place.copy_(value)
        relaunched.clear()
        out = attended(tensors, kernel=kernel, variant=variant)[0]
        assert relaunched
    stream.synchronize()
    assert torch.equal(out, right)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each()
def test_each_gpu_has_its_own_tape(kernel, variant, relaunched):
    skip_what_is_left(kernel, variant, 64)
    here, there = drawn(0), [t.to("cuda:1") for t in drawn(0)]
    for _ in range(3):
        right = attended(here, kernel=kernel, variant=variant)[0]
        out = attended(there, kernel=kernel, variant=variant)[0]
    assert len(relaunched) % 2 == 0
    assert relaunched
    assert out.device == torch.device("cuda:1")
    assert torch.equal(out.to("cuda:0"), right)
    assert torch.cuda.current_device() == 0


def test_memory_of_a_repeated_call_is_that_of_the_call(relaunched):
    tensors = drawn(0, seq=9000, dim=128)

    def peak():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = sage_plugin.attention(*tensors, kernel="fav3_sage")
        del out
        return torch.cuda.max_memory_allocated() - before

    first, _ = peak(), peak()
    assert relaunched == []
    assert peak() <= 1.02 * first
    assert relaunched
    answers = executor.resolver.answers.values()
    assert any(isinstance(e, executor.Executor) and e.recorded for e in answers)
