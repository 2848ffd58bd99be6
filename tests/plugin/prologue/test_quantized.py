"""Q is quantized in the pass of its norm and embedding, in patched models in the interpreter."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

pytest.importorskip("diffusers")

from sage_plugin.kernels.attention.prologue import emulation
from sage_plugin.kernels.attention.prologue.one_pass import OnePass
from sage_plugin.plugin import route
from sage_plugin.plugin.patch import patch, unpatch
from sage_plugin.plugin.policy.rules import SCHEMA_VERSION, Policy, Rule
from sage_plugin.plugin.prologue import settle
from tests.plugin.tiny import tiny

pytestmark = pytest.mark.usefixtures("everywhere", "interpreted", "unconfigured")

SAGE = {"kernel": "sage", "variant": "portable", "min_seq": 0}
RULES = (Rule(kernel="sage:portable", launch={"smooth_k": False}),)


def counts(handle):
    """Calls that quantized Q with its prologue, and why others did not."""
    rows = handle.report().rows
    reasons = sum((Counter(row.one_pass) for row in rows), Counter())
    return sum(row.in_quantization for row in rows), dict(reasons)


def near(found, expected):
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("name", ["cogx", "wan", "flux"])
def test_the_first_call_is_two_passes_and_all_others_one(name):
    model = tiny(name)
    exact = model.run()
    handle = patch(model.module, **SAGE)
    first, fused = model.run(), handle.report().fused_calls()
    before, none = counts(handle)
    near(first, exact)
    second = model.run()
    assert counts(handle) == (before + fused, none)
    assert none == {}
    assert handle.report().fused_calls() == handle.report().kernel_calls() == 2 * fused
    assert "; which quantized Q x" in " ".join(handle.report().text().split())
    near(second, first)
    unpatch(model.module)
    assert torch.equal(model.run(), exact)


def test_a_policy_may_choose_the_kernel():
    model = tiny("flux")
    handle = patch(model.module, policy=Policy(SCHEMA_VERSION, RULES), min_seq=0)
    first = model.run()
    near(model.run(), first)
    assert counts(handle) == (2, {})


def test_whoever_looks_at_q_gets_it_made():
    model = tiny("flux")
    handle = patch(model.module, **SAGE, check_finite=True)
    first = model.run()
    near(model.run(), first)
    assert counts(handle) == (0, {})
    seen = []
    handle = patch(model.module, **SAGE)
    handle.listeners.append(lambda event: seen.append(event.q.float().sum()))
    near(model.run(), first)
    near(model.run(), first)
    assert (len(seen), counts(handle)) == (4, (0, {}))


def test_kernels_that_read_16_bits_and_calls_on_the_host_get_it_made():
    model = tiny("flux")
    exact = model.run()
    for kernel, reasons in (("fav2", {OnePass.UNQUANTIZED: 2}), ("auto", {})):
        handle = patch(model.module, kernel=kernel, min_seq=0)
        for _ in range(2):
            torch.testing.assert_close(model.run(), exact, rtol=1e-4, atol=1e-5)
        assert counts(handle) == (0, reasons)
        assert handle.report().fused_calls() == 4
        assert "quantize" not in handle.report().text()


def test_what_differs_from_two_passes_is_told_and_left(monkeypatch):
    from sage_plugin.kernels.attention.backends.triton import launch

    stock = launch.quantized_pair

    def wrong(pair, rows):
        k = stock(pair, rows)
        rows.values[:, :, 3:6] = 1
        return k

    monkeypatch.setattr(launch, "quantized_pair", wrong)
    model = tiny("flux")
    handle = patch(model.module, **SAGE)
    first = model.run()
    near(model.run(), first)
    assert counts(handle) == (0, {OnePass.DIFFERENT: 2})
    text = " ".join(handle.report().text().split())
    assert "did not quantize Q x1: it differed from two passes" in text


def test_no_first_comparison_while_a_cuda_graph_is_recorded(monkeypatch):
    model = tiny("flux")
    handle = patch(model.module, **SAGE)
    model.run()
    monkeypatch.setattr(settle, "_is_capturing", lambda x: True)
    model.run()
    assert counts(handle) == (0, {OnePass.CAPTURING: 2})


def test_a_processor_that_reads_q_afterwards_finds_it(monkeypatch):
    """What was handed on is repeated as the model made it."""
    model, read = tiny("flux"), []
    stock = route.attend

    def reading(host, call, blocked):
        out = stock(host, call, blocked)
        if call.prologue is not None:
            read.append((waiting[-1] * 1, emulation.joined(call.prologue.q)))
        return out

    waiting, settled = [], route.settled
    monkeypatch.setattr(route, "attend", reading)
    monkeypatch.setattr(route, "settled", lambda call: waiting.append(call.q) or settled(call))
    handle = patch(model.module, **SAGE)
    model.run()
    model.run()
    assert counts(handle) == (2, {})
    assert len(read) == 2
    for found, expected in read:
        torch.testing.assert_close(found, expected)
