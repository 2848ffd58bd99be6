"""Norm and rotary embedding of Q and K on a device: kernel, repetitions, and a patched layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sage_plugin.kernels.attention.call import AttentionCall, KernelRequest
from sage_plugin.kernels.attention.executor import resolve
from sage_plugin.kernels.attention.prologue import apply, emulation
from sage_plugin.kernels.attention.prologue.pair import QkPair
from sage_plugin.kernels.attention.prologue.record import QkNorm, QkStream, Rope
from sage_plugin.plugin.patch import patch
from tests.gpu.variants import PAIRS, each, skip_what_is_left
from tests.kernels.calls import QUANTIZED
from tests.kernels.test_prologue import LIMITS, ROWS, error, oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def on_device(stream: QkStream) -> QkStream:
    norm, rope = stream.norm, stream.rope
    if norm is not None:
        weight, bias = (None if t is None else t.cuda() for t in (norm.weight, norm.bias))
        norm = replace(norm, weight=weight, bias=bias)
    if rope is not None:
        rope = replace(rope, cos=rope.cos.cuda(), sin=rope.sin.cuda())
    return QkStream(stream.source.cuda(), norm, rope)


@pytest.mark.parametrize("name", ROWS)
def test_the_kernel_is_the_emulation_each_time(name):
    row = replace(ROWS[name], heads=6, tokens=201) if name == "cogvideox" else ROWS[name]
    for dtype, limit in LIMITS.items():
        for seed in range(4):  # launched, recorded, replayed
            torch.manual_seed(seed)
            rope = row.rope()
            q, k = (row.streams(dtype, rope) for _ in range(2))
            found = apply.joined_pair([on_device(x) for x in q], [on_device(x) for x in k])
            for made, streams in zip(found, (q, k), strict=True):
                exact, expected = oracle(streams), emulation.joined(streams)
                assert error(made.cpu(), exact) <= 1.2 * error(expected, exact) + 1e-7
                apart = (
                    limit if row.rounds_first and row.bias else 0.7 * limit
                )  # a rounding may go either way
                assert error(made.cpu(), expected.double()) <= apart


QUANTIZING = [pair for pair in PAIRS if pair[0] in QUANTIZED]
LONG = (
    replace(ROWS["ltx2"], head_dim=72, tokens=150),
    replace(ROWS["flux"], head_dim=64, heads=5, tokens=150),
    replace(ROWS["cogvideox"], tokens=301, turned=(40, 301)),
)


@each(QUANTIZING)
def test_q_is_quantized_as_in_two_passes(kernel, variant):
    """Launched, recorded and replayed; a form for each kernel."""
    row = LONG[QUANTIZING.index((kernel, variant)) % len(LONG)]
    skip_what_is_left(kernel, variant, row.head_dim)
    request, ran = KernelRequest(kernel, variant), None
    for seed in range(4):
        torch.manual_seed(seed)
        rope = row.rope()
        q, k = ([on_device(x) for x in row.streams(torch.bfloat16, rope)] for _ in range(2))
        pair = QkPair(tuple(q), tuple(k))
        unmade = pair.unmade("bhsd")
        v = torch.randn(unmade[0].shape, device="cuda").bfloat16()
        call = AttentionCall(*unmade, v, prologue=pair)
        ran = ran or resolve(call, request)
        if seed == 0:
            ran.compare(call)
        found, apart = ran.run(call)[0], resolve(call.made(), request).run(call.made())[0]
        assert error(found, apart.double()) < 0.01  # a number may round either way
    assert ran.one_pass is None
    assert ran.recorded is not None


def test_offsets_are_64_bit():
    """The last of 2**31 values and more."""
    tokens, heads, width = 2**17 + 3, 64, 128
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB")
    source = torch.zeros(2, tokens, heads, width, device="cuda", dtype=torch.bfloat16)
    source[-1, -1, -1] = torch.arange(width, device="cuda")
    angles = torch.randn(tokens, width // 2, device="cuda")
    stream = QkStream(source, QkNorm("rms"), Rope(angles.cos(), angles.sin()))
    last = QkStream(source[-1:, -1:], QkNorm("rms"), Rope(angles[-1:].cos(), angles[-1:].sin()))
    found = apply.joined([stream])[-1:, -1:]
    torch.testing.assert_close(found, emulation.joined([last]), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kernel", ["fav2", "sage"])
def test_a_patched_layer_runs_fused_and_near(kernel):
    pytest.importorskip("diffusers")
    from diffusers.models.attention_processor import Attention, CogVideoXAttnProcessor2_0

    layer = torch.nn.ModuleDict({"attn1": Attention(
        query_dim=256, dim_head=64, heads=4, qk_norm="layer_norm", eps=1e-6, bias=True,
        processor=CogVideoXAttnProcessor2_0(),
    )}).to("cuda", torch.bfloat16)  # fmt: skip
    hidden, text = (torch.randn(2, n, 256, device="cuda").bfloat16() for n in (1200, 100))
    angles = torch.randn(1200, 32, device="cuda").repeat_interleave(2, 1)
    rope = (angles.cos(), angles.sin())

    def run():
        return layer["attn1"](hidden, encoder_hidden_states=text, image_rotary_emb=rope)[0]

    with torch.no_grad():
        before = run()
        handle = patch(layer, kernel=kernel)
        for _ in range(3):
            after = run()
        handle.unpatch()
    assert handle.report().fused_calls() == 3
    assert [row.in_quantization for row in handle.report().rows] == [2 * (kernel == "sage")]
    assert error(after, before.double()) < {"fav2": 0.01, "sage": 0.03}[kernel]
