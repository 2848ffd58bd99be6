"""Q and K at attention: when the kernel is left out, and what a report says of it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")

from sage_plugin.plugin.patch import patch
from sage_plugin.plugin.policy.rules import SCHEMA_VERSION, Policy, Rule
from sage_plugin.plugin.prologue import eligible, settle
from sage_plugin.plugin.prologue.unfused import Unfused
from tests.plugin.tiny import tiny

pytestmark = pytest.mark.usefixtures("everywhere")


def rows_of(handle):
    return {row.layer: (row.fused, row.unfused) for row in handle.report().rows}


def test_layers_that_a_policy_leaves_to_sdpa_keep_every_bit():
    model = tiny("wan")
    rules = (Rule(kernel="sdpa", layers=("blocks.0.*",)), Rule(kernel="fav2", layers=("*.attn1",)))
    handle = patch(model.module, policy=Policy(SCHEMA_VERSION, rules), min_seq=0)
    model.run()
    assert rows_of(handle) == {
        "transformer.blocks.0.attn1": (0, {Unfused.EXACT: 1}),
        "transformer.blocks.0.attn2": (0, {Unfused.EXACT: 1}),
        "transformer.blocks.1.attn1": (1, {}),
        "transformer.blocks.1.attn2": (0, {Unfused.EXACT: 1}),
    }
    assert handle.report().fused_calls() == 1
    text = " ".join(handle.report().text().split())
    assert "norm and RoPE in one kernel x1" in text
    assert "as they were" not in text


def test_a_kernel_that_cannot_be_built_is_tried_once(monkeypatch):
    tries = []

    def failing(streams):
        tries.append(streams)
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(settle, "_joined", failing)
    model = tiny("cogx")
    before = model.run()
    handle = patch(model.module, kernel="fav2", min_seq=0)
    torch.testing.assert_close(model.run(), before, rtol=1e-5, atol=1e-5)
    assert len(tries) == 1
    assert {reason for _, told in rows_of(handle).values() for reason in told} == {
        Unfused.BUILD_FAILED
    }
    patch(model.module, kernel="fav2", min_seq=0)  # forgets it
    model.run()
    assert len(tries) == 2


def test_an_error_of_the_device_is_raised(monkeypatch):
    def failing(streams):
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(settle, "_joined", failing)
    model = tiny("cogx")
    patch(model.module, kernel="fav2", min_seq=0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        model.run()


def test_no_first_comparison_while_a_cuda_graph_is_recorded(monkeypatch):
    model, capturing = tiny("cogx"), [True]
    monkeypatch.setattr(settle, "_is_capturing", lambda x: capturing[0])
    handle = patch(model.module, kernel="fav2", min_seq=0)
    model.run()
    assert [*rows_of(handle).values()] == [(0, {Unfused.CAPTURING: 1})] * 2
    capturing[0] = False
    model.run()
    capturing[0] = True
    model.run()
    assert [*rows_of(handle).values()] == [(2, {Unfused.CAPTURING: 1})] * 2


def test_calls_on_the_host_get_the_same_q_and_k():
    """`min_seq` aside, a call that no attention kernel takes is prepared by ours all the same."""
    model = tiny("flux")
    before = model.run()
    handle = patch(model.module, kernel="auto", min_seq=0)  # on a CPU, the host's attention
    after = model.run()
    assert [fused for fused, _ in rows_of(handle).values()] == [1, 1]
    assert handle.report().kernel_calls() == 0
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


NEAR = {
    "equal": (lambda x: x, True),
    "rounded": (lambda x: x + x.abs().amax(-1, keepdim=True) / 128, True),
    "far": (lambda x: x + x.abs().amax(-1, keepdim=True) * 5 / 128, False),
    "one_far": (lambda x: x.index_fill(1, torch.tensor([4999]), 9), False),
    "nan": (lambda x: x / 0 * 0, False),
    "dtype": (lambda x: x.float(), False),
    "shape": (lambda x: x[:, 1:], False),
}


@pytest.mark.parametrize("name", NEAR)
def test_rounding_is_a_few_units_of_a_row(name, monkeypatch):
    monkeypatch.setattr(eligible, "COMPARED_AT_ONCE", 2048)
    change, expected = NEAR[name]
    x = torch.randn(1, 5000, 3, 4).bfloat16()
    assert eligible.is_rounding(change(x), x) is expected


def test_what_is_not_finite_in_both_is_equal():
    x = torch.randn(1, 4, 2, 4)
    x[0, 1], x[0, 2, 0, 0] = torch.nan, torch.inf
    assert eligible.is_rounding(x.clone(), x)
