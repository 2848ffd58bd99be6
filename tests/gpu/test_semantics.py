"""Masks, windows, caps, sinks, packed sequences and compilers on a device."""

from __future__ import annotations

import gc
import math

import pytest
import torch

import sage_plugin
from sage_plugin import device
from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.attention.call import shape_of
from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams, Decision, Packed
from tests.gpu.variants import PAIRS, each, skip_what_is_left

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

QUANTIZED = [(kernel, variant) for kernel, variant in PAIRS if kernel != "fav2"]
KERNELS = ("fav2", "sage", "fav3_sage", "fav3_fp8")
BATCH, HEADS_Q, HEADS_K, SEQ_Q, SEQ_K = 2, 4, 2, 300, 421


def inputs(dim, dtype=torch.bfloat16, seed=0, batch=BATCH):
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = ((HEADS_Q, SEQ_Q), (HEADS_K, SEQ_K), (HEADS_K, SEQ_K))
    q, k, v = (torch.randn(batch, *s, dim, generator=generator, device="cuda") for s in sizes)
    return q.to(dtype), (k + 2.0).to(dtype), (v + 0.5).to(dtype)


def mask_of(kind, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(3)
    shapes = {
        "padding": (BATCH, 1, 1, SEQ_K),
        "bias": (BATCH, 1, 1, SEQ_K),
        "bias of heads": (1, HEADS_Q, 1, SEQ_K),
        "dense": (1, 1, SEQ_Q, SEQ_K),
        "dense bias": (BATCH, 1, SEQ_Q, SEQ_K),
        "dead rows": (1, HEADS_Q, SEQ_Q, SEQ_K),
    }
    keep = torch.rand(shapes[kind], generator=generator, device="cuda") > 0.3
    if kind == "padding":
        keep = torch.ones_like(keep)
        keep[0, ..., :77] = keep[1, ..., 300:] = False
    if kind == "dead rows":
        keep[:, :, ::7] = False
    if "bias" not in kind:
        return keep
    bias = 2.0 * torch.randn(shapes[kind], generator=generator, device="cuda")
    return bias.masked_fill(~keep, -math.inf).to(dtype)


def _config_of_packed(kernel, q, k):
    shape = shape_of(q[None], k[None], k[None], causal=True, scale=0.1, layout="bshd")
    facts = dispatch.facts_of("cuda", 0)
    key = dispatch.call_key(shape, Decision(kernel, "portable"))
    return dispatch.find_launch(key, facts).config


@each(QUANTIZED)
@pytest.mark.parametrize("two_step", [False, True], ids=["one step", "two steps"])
def test_report_27_memory_is_inputs_operands_scales_and_output(kernel, variant, two_step):
    skip_what_is_left(kernel, variant, 128)
    batch, heads, seq, dim = 1, 16, 16384, 128
    gc.collect()
    torch.cuda.empty_cache()
    q, k, v = (
        torch.randn(batch, heads, seq, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    options = {"kernel": kernel, "variant": variant}
    sage_plugin.attention(q[:, :, :512], k[:, :, :512], v[:, :, :512], **options)
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated() - 3 * q.numel() * 2
    torch.cuda.reset_peak_memory_stats()
    elements = q.numel()
    operands = elements * (2 + (2 if kernel == "sage" else 1))
    scales = batch * heads * seq * 4 * 4
    if variant == "hopper":  # at most two pieces of split tiles on each multiprocessor
        scales += 2 * device.facts("cuda").sm_count * 192 * (dim + 1) * 4
    if two_step:
        prepared = sage_plugin.prepare(q, k, v, **options)
        del q, k, v
        torch.cuda.reset_peak_memory_stats()
        out = sage_plugin.launch(prepared)
        allowed = operands + scales + elements * 2
    else:
        out = sage_plugin.attention(q, k, v, **options)
        allowed = 3 * elements * 2 + operands + scales + elements * 2
    assert torch.cuda.max_memory_allocated() - base <= 1.05 * allowed
    assert torch.isfinite(out).all()


@each([pair for pair in PAIRS if pair[0] in ("fav2", "fav3_sage")])
def test_report_75_a_masked_call_compiles_for_every_length(kernel, variant):
    skip_what_is_left(kernel, variant, 64)
    options = {"kernel": kernel, "variant": variant}
    compiled = []

    def counting(graph, _):
        compiled.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, dynamic=None, backend=counting)
    def attend(q, k, v, mask):
        return sage_plugin.attention(q, k, v, attn_mask=mask, **options) + 1

    for seq in (256, 300, 512, 777):
        q, k, v = (torch.randn(1, 2, seq, 64, device="cuda", dtype=torch.float16) for _ in range(3))
        mask = torch.rand(1, 1, 1, seq, device="cuda") > 0.3
        expected = sage_plugin.attention(q, k, v, attn_mask=mask, **options) + 1
        assert torch.equal(attend(q, k, v, mask), expected)
    assert len(compiled) <= 2


@pytest.mark.parametrize("kernel", KERNELS)
def test_report_76_a_replayed_graph_reads_the_mask_anew(kernel):
    q, k, v = inputs(64)
    mask = mask_of("dense")
    sage_plugin.attention(q, k, v, attn_mask=mask, kernel=kernel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sage_plugin.attention(q, k, v, attn_mask=mask, kernel=kernel)
    mask.copy_(~mask)
    q.copy_(torch.randn_like(q))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, sage_plugin.attention(q, k, v, attn_mask=mask, kernel=kernel))


@each()
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_report_74_opcheck(kernel, variant, masked):
    skip_what_is_left(kernel, variant, 80)
    q, k, v = (t.transpose(1, 2) for t in inputs(80, torch.float16))
    q, k, v = (t.contiguous().transpose(1, 2) for t in (q, k, v))
    mask = mask_of("padding") if masked else None
    arguments = (q, k, v, mask, None, 0.1, False, -1, -1, 0.0, kernel, variant, "bhsd", "", "")
    for op in (torch.ops.sage_plugin.attention, torch.ops.sage_plugin.attention_with_lse):
        torch.library.opcheck(op, (*arguments, None))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each()
@pytest.mark.parametrize("current", [0, 1])
def test_report_81_82_a_second_gpu_works_while_another_is_current(kernel, variant, current):
    skip_what_is_left(kernel, variant, 128)
    q, k, v = inputs(128)
    mask = mask_of("padding")
    options = {"kernel": kernel, "variant": variant}
    expected = sage_plugin.attention(q, k, v, attn_mask=mask, **options)
    torch.cuda.set_device(current)
    try:
        there = [t.to("cuda:1") for t in (q, k, v, mask)]
        out = sage_plugin.attention(*there, **options)
        assert torch.cuda.current_device() == current
        assert out.device == torch.device("cuda", 1)
        assert torch.equal(out.to("cuda:0"), expected)
        built = implementation(kernel, variant)
        assert built is implementation(kernel, variant)
    finally:
        torch.cuda.set_device(0)


def test_packed_problems_and_batches_share_a_form():
    cu = torch.tensor([0, SEQ_K], dtype=torch.int32, device="cuda")
    q, k, v = (t[:1, :, :SEQ_Q].transpose(1, 2) for t in inputs(64))
    k, v = (t[:1].transpose(1, 2) for t in inputs(64)[1:])
    cu_q = torch.tensor([0, SEQ_Q], dtype=torch.int32, device="cuda")
    built = implementation("fav3_sage", "portable", torch.float8_e4m3fn)
    config = _config_of_packed("fav3_sage", q[0], k[0])
    results = []
    for packed in (None, Packed(cu_q, cu, SEQ_Q, SEQ_K)):
        problem = AttentionParams(0.125, True, "bshd", packed=packed)
        operands = built.prepare(q, k, v, problem=problem, launch=config)
        results.append(built.launch(operands)[0])
    assert torch.equal(*results)
