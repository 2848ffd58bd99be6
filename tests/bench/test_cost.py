"""Operations and bytes against counts by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_plugin.bench.cost import flops, moved_bytes, visible_pairs
from sage_plugin.kernels import dispatch
from sage_plugin.kernels.attention.implementations import implementation
from sage_plugin.kernels.contract import Problem
from sage_plugin.measure.inputs import presets, self_attention, synthetic


@pytest.mark.parametrize("seq_q", [1, 2, 5, 9])
@pytest.mark.parametrize("seq_k", [1, 4, 5, 9])
def test_causal_pairs_are_those_of_the_mask(seq_q, seq_k):
    rows = torch.arange(seq_q)[:, None] + (seq_k - seq_q)
    mask = torch.arange(seq_k)[None, :] <= rows
    assert visible_pairs(seq_q, seq_k, causal=True) == int(mask.sum())
    assert visible_pairs(seq_q, seq_k, causal=False) == seq_q * seq_k


def test_flops_of_the_first_preset():
    assert flops(presets()["cogvideox-2b"]) == 2 * 2 * 30 * 128 * 17776**2


def test_flops_count_query_heads_and_both_widths():
    shape = dataclasses.replace(self_attention(3, 4, 5, 8), heads_k=2, seq_k=7, dv=16, causal=True)
    # Rows 0..4 see 3, 4, 5, 6 and 7 keys.
    assert flops(shape) == 2 * 3 * 4 * (8 + 16) * 25


def cpu_bytes(kernel, shape):
    q, k, v = synthetic(shape, device="cpu")
    decision = dispatch.decide(shape, dispatch.facts_of("cpu", None), kernel=kernel)
    built = implementation(decision.kernel, decision.variant)
    config = None
    if decision.variant != "host":
        key = dispatch.call_key(shape, decision)
        config = dispatch.default_launch(key, dispatch.facts_of("cpu", None))
    problem = Problem(shape.scale, shape.causal, shape.layout)
    operands = built.prepare(q, k, v, problem=problem, launch=config)
    return moved_bytes(operands, shape), config


@pytest.mark.parametrize("kernel", ["torch", "sdpa", "fav2"])
def test_bytes_without_quantisation_are_the_four_tensors(kernel):
    shape = dataclasses.replace(self_attention(1, 4, 128, 64), heads_k=2)
    moved, _ = cpu_bytes(kernel, shape)
    assert moved == 2 * 128 * 64 * (4 + 2 + 2 + 4)


@pytest.mark.parametrize(("kernel", "v_bytes"), [("sage", 2), ("fav3_sage", 1), ("fav3_fp8", 1)])
def test_bytes_of_quantised_operands_have_their_true_sizes(kernel, v_bytes):
    shape = self_attention(1, 2, 256, 64)
    moved, config = cpu_bytes(kernel, shape)
    tensors = 2 * 256 * 64 * (1 + 1 + v_bytes + 2)  # INT8 or FP8 in, a bf16 output
    q_scales, k_scales = 2 * 256 * 4, 2 * (256 // config.block_n) * 4
    channels = 3 * 2 * 64 * 4  # scale and mean of V, mean of K
    assert moved == tensors + q_scales + k_scales + channels
