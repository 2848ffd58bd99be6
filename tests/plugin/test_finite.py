"""`check_finite`: the first NaN is named, and its layer gives way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.plugin import route
from sage_plugin.plugin.patch import patch
from tests.plugin.toys import Direct, ToyAttention, qkv

UNBUILT = FallbackReason(Fallback.BUILD_FAILED, ("RuntimeError", "no compiler"))


@pytest.fixture
def faulty(monkeypatch):
    """A kernel whose output has a NaN where a score is huge, which Q of 1e4 makes."""
    real = route.Executor.run

    def run(executor, call):
        out, lse = real(executor, call)
        if call.q.abs().max() > 1e3:
            out[..., 0] = float("nan")
        return out, lse

    monkeypatch.setattr(route.Executor, "run", run)


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def patched_pair(**options):
    model = nn.ModuleDict({"a": ToyAttention(Direct()), "b": ToyAttention(Direct())})
    model.forward = lambda q, k, v: [model[name](q, k, v) for name in "ab"]
    return model, patch(model, kernel="sage", min_seq=0, **options)


@pytest.mark.usefixtures("faulty")
def test_the_first_nan_is_named_and_its_layer_gives_way(caplog):
    model, handle = patched_pair(check_finite=True)
    q, k, v = qkv()
    model(q, k, v)
    assert warnings(caplog) == []
    huge = 1e4 * q
    expected = F.scaled_dot_product_attention(huge, k, v)
    assert torch.equal(model["a"](huge, k, v), expected)
    (line,) = warnings(caplog)
    assert line.startswith("model.a, forward 1, kernel 'sage:emulation': finite inputs gave")
    assert torch.equal(model["a"](q, k, v), F.scaled_dot_product_attention(q, k, v))
    first, second = handle.report().rows
    assert (first.kernel_calls(), first.fallbacks) == (1, {route.NOT_FINITE: 2})
    assert (second.kernel_calls(), second.fallbacks) == (1, {})
    assert len(warnings(caplog)) == 1
    patch(model, kernel="sage", min_seq=0, check_finite=True)
    assert not torch.equal(model["a"](q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.usefixtures("faulty")
def test_without_the_check_nothing_is_looked_at(caplog):
    model, _ = patched_pair()
    q, k, v = qkv()
    assert model["a"](1e4 * q, k, v).isnan().any()
    assert warnings(caplog) == []


@pytest.mark.parametrize("which", ["v", "mask"])
def test_inputs_that_are_not_finite_are_no_fault_of_the_kernel(caplog, which):
    model, handle = patched_pair(check_finite=True)
    q, k, v = qkv()
    mask = torch.zeros(24, 24) if which == "mask" else None
    (v[0, 0] if mask is None else mask)[3, 1] = float("nan")
    for _ in range(2):
        assert model["a"](q, k, v, attn_mask=mask).isnan().any()
    (line,) = warnings(caplog)
    assert "Q, K, V or the mask has NaN or infinity already" in line
    assert handle.report().rows[0].calls == {"sage:emulation": 2}


def test_a_kernel_that_cannot_be_built_leaves_autocast_to_the_host(monkeypatch):
    model, handle = patched_pair()
    monkeypatch.setattr(route, "build_failure", lambda error: UNBUILT)
    monkeypatch.setattr(route.Executor, "run", lambda *_, **__: 1 / 0)
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = model["a"](q, k, v), F.scaled_dot_product_attention(q, k, v)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    assert handle.report().rows[0].fallbacks == {UNBUILT: 1}
