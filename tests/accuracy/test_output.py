"""Kernels that cheat or break things are found (E1, E3), by replacing the kernel's entry."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_plugin.accuracy import output
from sage_plugin.accuracy.gate import failures
from sage_plugin.families.attention import replay
from sage_plugin.families.attention.gates import gate_for
from sage_plugin.kernels.attention.api import attention
from sage_plugin.measure.inputs import self_attention, synthetic
from sage_plugin.measure.masks import synthetic_mask
from tests.accuracy.judged import attention_errors

SHAPE = self_attention(1, 2, 64, 32)


def judged(monkeypatch, fake, *, distribution="normal", shape=SHAPE):
    monkeypatch.setattr(replay, "attention", fake)
    q, k, v = synthetic(shape, device="cpu", distribution=distribution)
    found = attention_errors("fav2", "auto", None, q, k, v, causal=False, scale=None)
    return found, failures(gate_for("fav2"), found)


def honest(q, k, v, **options):
    return attention(q, k, v, **options)


def test_an_honest_kernel_passes(monkeypatch):
    found, broken = judged(monkeypatch, honest)
    assert broken == []
    assert found.suspect == ""


def test_e1_a_kernel_that_writes_nothing_is_rejected(monkeypatch):
    def lazy(q, k, v, *, out_dtype, **options):
        return torch.empty(q.shape, dtype=out_dtype)

    _, broken = judged(monkeypatch, lazy)
    assert broken


def test_e1_the_memory_of_the_run_before_is_poisoned(monkeypatch):
    # An allocator that hands out the block freed last, as CUDA's caching allocator does.
    blocks = []
    full = torch.full

    def recorded(shape, value, **options):
        blocks.append(full(shape, value, **options))
        return blocks[-1]

    def lazy(q, k, v, *, out_dtype, **options):
        reused = blocks[-1]
        assert reused.shape == q.shape
        assert reused.dtype == out_dtype
        return reused

    monkeypatch.setattr(output.torch, "full", recorded)
    found, broken = judged(monkeypatch, lazy)
    assert found.bad_values == 2 * 2 * 64 * 32
    assert broken[0] == "8192 NaN or infinite values in the output, allowed are 0"


def test_one_bad_value_outside_the_sampled_rows_is_found(monkeypatch):
    def almost(q, k, v, **options):
        out = attention(q, k, v, **options)
        out[0, 1, 300, 5] = float("inf")
        return out

    shape = self_attention(1, 2, 600, 32)
    found, broken = judged(monkeypatch, almost, shape=shape)
    assert found.bad_values == 2
    assert found.cosine > 0.9999
    assert len(broken) == 1


def test_e3_a_kernel_that_scribbles_on_its_input_is_found(monkeypatch):
    def scribbles(q, k, v, **options):
        out = attention(q, k, v, **options)
        k.sub_(k.mean(2, keepdim=True))
        return out

    found, broken = judged(monkeypatch, scribbles, distribution="biased")
    assert "it changed its input k" in found.suspect
    assert any("changed its input k" in sentence for sentence in broken)


@pytest.mark.parametrize(
    ("cheat", "said"),
    [
        (lambda q, k, v: torch.full_like(q, 0.25), "its output is constant"),
        (lambda q, k, v: q.clone(), "its output is its input q"),
        (lambda q, k, v: v.clone(), "its output is its input v"),
    ],
)
def test_outputs_that_ignore_the_data_are_named(monkeypatch, cheat, said):
    def fake(q, k, v, *, out_dtype, **options):
        return cheat(q, k, v).to(out_dtype)

    found, broken = judged(monkeypatch, fake)
    assert found.suspect == said
    assert broken


def test_one_key_makes_v_the_right_output(monkeypatch):
    found, broken = judged(monkeypatch, honest, shape=self_attention(1, 1, 1, 32))
    assert found.suspect == ""
    assert broken == []


def test_an_own_dtype_path_that_computes_something_else_is_found(monkeypatch):
    def two_faced(q, k, v, *, out_dtype, **options):
        out = attention(q, k, v, out_dtype=out_dtype, **options)
        return out * 0.8 if out_dtype == torch.bfloat16 else out

    found, broken = judged(monkeypatch, two_faced)
    assert found.suspect == "its bfloat16 output is not its fp32 output, rounded"
    assert broken


@pytest.mark.parametrize("kind", ["key_bias", "dense"])
def test_a_masked_call_is_judged_with_its_mask(monkeypatch, kind):
    shape = dataclasses.replace(SHAPE, mask_kind=kind)
    q, k, v = synthetic(shape, device="cpu", distribution="drift")
    mask = synthetic_mask(shape, device="cpu")

    def judge(fake):
        monkeypatch.setattr(replay, "attention", fake)
        return attention_errors("fav2", "auto", None, q, k, v, causal=True, scale=None, mask=mask)

    found = judge(attention)
    assert failures(gate_for("fav2"), found) == []
    forgetful = judge(lambda q, k, v, attn_mask, **options: attention(q, k, v, **options))
    assert forgetful.rel_l1 > 0.1

    def scribbles(q, k, v, attn_mask, **options):
        out = attention(q, k, v, attn_mask, **options)
        attn_mask.fill_(True)
        return out

    assert judge(scribbles).suspect.startswith("it changed its input mask")


def test_grouped_heads_and_strided_memory():
    q = torch.randn(1, 48, 4, 32).transpose(1, 2)
    k, v = (torch.randn(1, 64, 2, 32).transpose(1, 2) for _ in range(2))
    found = attention_errors("fav2", "auto", None, q, k, v, causal=True, scale=0.3)
    assert failures(gate_for("fav2"), found) == []
