"""One call at a time: which kernel it takes, or for which counted reason the host takes it."""

from __future__ import annotations

import inspect
import logging
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from sage_plugin.errors import PatchError, UnsupportedInputError
from sage_plugin.kernels.attention.api import attention
from sage_plugin.kernels.attention.call import TENSOR_SUBCLASS
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.plugin import obstacle, route
from sage_plugin.plugin.patch import patch, patched, unpatch
from tests.plugin.toys import (
    Direct,
    Dispatching,
    Tagged,
    ThreeCalls,
    ToyAttention,
    counts,
    only_reason,
    patched_toy,
    qkv,
)


@pytest.mark.parametrize("processor", [Direct, Dispatching])
@pytest.mark.parametrize("kernel", ["sage", "fav3_sage", "fav3_fp8", "fav2"])
def test_a_named_kernel_computes_what_the_function_computes(processor, kernel):
    layer, handle = patched_toy(processor, kernel=kernel)
    q, k, v = qkv()
    expected = attention(q, k, v, kernel=kernel)
    torch.testing.assert_close(layer(q, k, v), expected, rtol=0, atol=1e-6)
    exact = F.scaled_dot_product_attention(q, k, v)
    assert not torch.equal(expected, exact) or kernel == "fav2"
    assert counts(handle) == ({f"{kernel}:emulation": 1}, {})
    assert handle.report().rows[0].config_sources == {"default": 1}


@pytest.mark.parametrize("processor", [Direct, Dispatching])
def test_scale_and_causal_reach_the_kernel(processor):
    layer, _ = patched_toy(processor)
    q, k, v = qkv()
    for options in ({"scale": 0.5}, {"is_causal": True}):
        exact = F.scaled_dot_product_attention(q, k, v, **options)
        error = (layer(q, k, v, **options) - exact).abs().sum() / exact.abs().sum()
        assert 0 < error < 0.02, options


@pytest.mark.parametrize("processor", [Direct, Dispatching])
def test_grouped_heads_reach_the_kernel_only_where_the_host_takes_them(processor):
    layer, handle = patched_toy(processor)
    q, k, v = qkv(heads=4, kv_heads=2)
    exact = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    error = (layer(q, k, v, enable_gqa=True) - exact).abs().sum() / exact.abs().sum()
    assert 0 < error < 0.02
    assert counts(handle)[0] == {"sage:emulation": 1}
    with pytest.raises(RuntimeError):
        layer(q, k, v)
    assert counts(handle)[1] == {route.SHAPE: 1}


def test_report_92_the_entrance_has_the_signature_of_sdpa():
    ours = list(inspect.signature(route.sdpa).parameters.values())
    documented = ["attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert [p.name for p in ours] == ["query", "key", "value", *documented]
    assert [p.default for p in ours[3:]] == [None, 0.0, False, None, False]
    layer, _ = patched_toy()
    with pytest.raises(TypeError, match="sm_scale"):
        layer(*qkv(), sm_scale=1.0)


@pytest.mark.parametrize("kernel", ["sage", "torch"])
def test_report_95_a_gradient_flows_as_it_did(kernel):
    layer, handle = patched_toy(kernel=kernel)
    q, k, v = (x.requires_grad_() for x in qkv())
    layer(q, k, v).square().sum().backward()
    ours = [x.grad.clone() for x in (q, k, v)]
    q.grad = k.grad = v.grad = None
    F.scaled_dot_product_attention(q, k, v).square().sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(ours, (q, k, v), strict=True))
    assert only_reason(handle).cause is Fallback.GRADIENT
    with torch.no_grad():
        layer(q, k, v)
    assert sum(counts(handle)[0].values()) == 1


@pytest.mark.parametrize("kernel", ["sage", "torch"])
def test_report_130_a_tangent_flows_as_it_did(kernel):
    layer, handle = patched_toy(kernel=kernel)
    q, k, v = qkv()
    with sdpa_kernel(SDPBackend.MATH):
        ours = torch.func.jvp(lambda q: layer(q, k, v), (q,), (v,))
        host = torch.func.jvp(lambda q: F.scaled_dot_product_attention(q, k, v), (q,), (v,))
    assert torch.equal(ours[1], host[1])
    assert host[1].any()
    assert only_reason(handle).cause is Fallback.GRADIENT


def test_report_130_a_mapped_layer_runs_on_the_kernel():
    layer, handle = patched_toy()
    q, k, v = (torch.stack([x, 2 * x]) for x in qkv())
    mapped = torch.func.vmap(layer)(q, k, v)
    each = torch.stack([layer(*one) for one in zip(q, k, v, strict=True)])
    torch.testing.assert_close(mapped, each, rtol=0, atol=1e-6)
    assert counts(handle) == ({"sage:emulation": 3}, {})


@pytest.mark.parametrize("kernel", ["sage", "torch"])
def test_dropout_goes_to_the_host(kernel):
    layer, handle = patched_toy(kernel=kernel)
    q, k, v = qkv()
    torch.manual_seed(5)
    out = layer(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert only_reason(handle).cause is Fallback.DROPOUT


@pytest.mark.parametrize("kernel", ["auto", "sage", "fav2"])
def test_report_102_short_calls_stay_on_the_host_whatever_the_kernel(kernel):
    layer, handle = patched_toy(kernel=kernel, min_seq=24)
    q, k, v = qkv(seq=24, kv_seq=23)
    assert torch.equal(layer(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert only_reason(handle) == FallbackReason(Fallback.SHORTER_THAN_MIN_SEQ, 24)
    layer(k, q, q)
    assert counts(handle)[1] == {FallbackReason(Fallback.SHORTER_THAN_MIN_SEQ, 24): 2}
    layer(q, q, q)
    assert counts(handle)[1][FallbackReason(Fallback.SHORTER_THAN_MIN_SEQ, 24)] == 2


def test_min_seq_is_1024_unless_given():
    layer = ToyAttention(Direct())
    handle = patch(layer, kernel="fav2")
    layer(*qkv(heads=1, seq=1023))
    assert only_reason(handle) == FallbackReason(Fallback.SHORTER_THAN_MIN_SEQ, 1024)
    layer(*qkv(heads=1, seq=1024))
    assert counts(handle)[0] == {"fav2:emulation": 1}


def test_report_84_auto_on_a_cpu_is_the_host_with_a_reason():
    layer, handle = patched_toy(kernel="auto")
    q, k, v = qkv()
    assert torch.equal(layer(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert only_reason(handle).cause is Fallback.CPU


def test_report_18_unsupported_head_dim_and_dtype_go_to_the_host():
    layer, handle = patched_toy()
    for q, k, v in (qkv(dim=264), qkv(dtype=torch.float64)):
        assert torch.equal(layer(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert len(counts(handle)[1]) == 2


def test_a_causal_rectangle_keeps_the_alignment_of_the_host():
    layer, handle = patched_toy()
    q, k, v = qkv(seq=24, kv_seq=40)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(layer(q, k, v, is_causal=True), expected)
    assert only_reason(handle) == obstacle.CAUSAL


def test_shapes_that_sdpa_broadcasts_go_to_the_host():
    layer, handle = patched_toy()
    q, k, v = qkv()
    assert torch.equal(layer(q, k[:1], v[:1]), F.scaled_dot_product_attention(q, k[:1], v[:1]))
    assert layer(q[0], k[0], v[0]).shape == q[0].shape
    assert counts(handle) == ({}, {route.SHAPE: 2})


class Recording(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.attention_calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.attention_calls += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def test_a_function_mode_still_sees_the_calls():
    layer, handle = patched_toy()
    with Recording() as mode:
        layer(*qkv())
    assert mode.attention_calls == 1
    assert only_reason(handle) == obstacle.FUNCTION_MODE
    with torch.device("cpu"):  # a function mode too, but one that does not care
        layer(*qkv())
    assert counts(handle)[0] == {"sage:emulation": 1}


def test_a_tensor_subclass_stays_with_the_host():
    layer, handle = patched_toy()
    q, k, v = qkv()
    assert type(layer(q.as_subclass(Tagged), k, v)) is Tagged
    assert only_reason(handle) == TENSOR_SUBCLASS


def test_a_device_without_kernels_stays_with_the_host():
    layer, handle = patched_toy()
    out = layer(*(x.to("meta") for x in qkv()))
    assert out.shape == (2, 2, 24, 16)
    assert only_reason(handle) == FallbackReason(Fallback.DEVICE, "meta")


@pytest.mark.parametrize("processor", [Direct, Dispatching])
def test_autocast_casts_as_it_casts_for_sdpa(processor):
    layer, handle = patched_toy(processor)
    q, k, v = qkv()
    mixed = (q, k, v.bfloat16())  # as layer norm leaves it: Q and K in fp32
    with torch.autocast("cpu", torch.bfloat16):
        out, exact = layer(*mixed), F.scaled_dot_product_attention(*mixed)
    assert out.dtype == exact.dtype == torch.bfloat16
    q, k, v = (x.bfloat16() for x in (q, k, v))
    assert torch.equal(out, attention(q, k, v, kernel="sage"))
    assert counts(handle)[0] == {"sage:emulation": 1}


def test_context_parallel_and_foreign_arguments_go_to_the_original_function():
    layer, handle = patched_toy(Dispatching)
    q, k, v = qkv()
    expected = F.scaled_dot_product_attention(q, k, v)
    for options in ({"parallel_config": object()}, {"attention_kwargs": {"a": 1}}, {"window": 3}):
        assert torch.allclose(layer(q, k, v, **options), expected)
    assert counts(handle) == ({}, {route.PARALLEL: 1, route.ARGUMENTS: 2})
    with pytest.raises(TypeError, match="unheard_of"):
        layer(q, k, v, unheard_of=1)


def test_the_environment_switches_it_off_and_on(monkeypatch):
    layer, handle = patched_toy()
    q, k, v = qkv()
    monkeypatch.setenv("SAGE_PLUGIN_DISABLE", "1")
    assert torch.equal(layer(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert only_reason(handle) == obstacle.DISABLED
    monkeypatch.setenv("SAGE_PLUGIN_DISABLE", "0")
    layer(q, k, v)
    assert counts(handle)[0] == {"sage:emulation": 1}


def test_the_environment_names_the_kernel_of_auto(monkeypatch):
    monkeypatch.setenv("SAGE_PLUGIN_KERNEL", "fav2")
    layer, handle = patched_toy(kernel="auto")
    layer(*qkv())
    assert counts(handle) == ({"fav2:emulation": 1}, {})


def test_sdpa_by_name_is_the_host_for_every_call():
    layer, handle = patched_toy(kernel="sdpa", min_seq=1024)
    q, k, v = qkv()
    mask = torch.rand(24, 24) > 0.3
    for options in ({}, {"attn_mask": mask}, {"is_causal": True}, {"scale": 0.2}):
        expected = F.scaled_dot_product_attention(q, k, v, **options)
        assert torch.equal(layer(q, k, v, **options), expected)
    assert counts(handle) == ({"sdpa:host": 4}, {})
    assert handle.report().kernel_calls() == 0


def test_the_exact_kernel_never_drops_a_mask():
    layer, handle = patched_toy(kernel="torch")
    q, k, v = qkv()
    mask = torch.rand(24, 24) > 0.3
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(layer(q, k, v, attn_mask=mask), exact)
    assert not torch.allclose(layer(q, k, v), exact)
    assert counts(handle) == ({"torch:host": 2}, {})


def test_strict_raises_but_not_for_what_the_user_asked(monkeypatch):
    layer, _ = patched_toy(on_unsupported="error", min_seq=20)
    q, k, v = qkv()
    with pytest.raises(UnsupportedInputError, match=r"model.*mask of torch.float64"):
        layer(q, k, v, attn_mask=torch.ones(24, 24, dtype=torch.float64))
    layer(*qkv(seq=8))
    monkeypatch.setenv("SAGE_PLUGIN_DISABLE", "1")
    layer(q, k, v)


def test_a_gpu_variant_on_cpu_tensors_says_so(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    layer, _ = patched_toy(variant="portable")
    with pytest.raises(UnsupportedInputError, match=r"sage:portable.*GPU.*CPU"):
        layer(*qkv())


def test_each_reason_is_logged_once_a_process(caplog):
    layer, _ = patched_toy()
    with caplog.at_level(logging.WARNING, "sage_plugin"):
        for _ in range(3):
            layer(*qkv(), dropout_p=0.1)
            layer(*qkv(dim=264))
        assert len(caplog.records) == 2
        patch(layer, kernel="sage", min_seq=0)
        layer(*qkv(), dropout_p=0.1)
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2
    assert all("model" in m and "'sage'" in m for m in messages)


def test_listeners_get_every_call_before_it_runs():
    layer, handle = patched_toy(ThreeCalls)
    events = []
    handle.listeners.append(events.append)
    q, k, v = qkv()
    for _ in range(2):
        layer(q, k, v, scale=0.25)
    layer(q, k, v, is_causal=True, dropout_p=0.1)
    assert [e.call_index for e in events] == [0, 1, 2] * 3
    first, last = events[0], events[-1]
    assert (first.component, first.layer, first.layout) == ("model", "model", "bhsd")
    assert first.q is q
    assert first.v is v
    assert (first.scale, first.is_causal, last.is_causal) == (0.25, False, True)
    assert (first.decision.label, first.decision.reason) == ("sage:emulation", None)
    assert last.decision.kernel == "sdpa"
    assert last.decision.reason.cause is Fallback.DROPOUT
    handle.listeners.clear()
    layer(q, k, v)
    assert len(events) == 9


def test_threads_keep_their_layers_apart():
    layers = {kernel: patched_toy(ThreeCalls, kernel=kernel) for kernel in ("sage", "fav2")}
    q, k, v = qkv()
    meet = threading.Barrier(2)

    def work(kernel):
        meet.wait()
        for _ in range(20):
            layers[kernel][0](q, k, v)

    threads = [threading.Thread(target=work, args=(kernel,)) for kernel in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for kernel, (_, handle) in layers.items():
        assert counts(handle) == ({f"{kernel}:emulation": 60}, {})


def test_an_exception_in_a_processor_leaves_no_layer_behind():
    layer, _ = patched_toy()
    with pytest.raises(RuntimeError):
        layer(*qkv(heads=4, kv_heads=3))
    assert route.STACK.frames == []
    unpatch(layer)


class OutOfResources(Exception):
    """Stands in for Triton's error of that name."""


OutOfResources.__module__ = "triton.runtime.errors"


def breaking(error, calls):
    def run(*_, **__):
        calls.append(1)
        raise error

    return run


def test_report_118_a_kernel_that_cannot_be_built_gives_way_and_is_not_tried_again(
    monkeypatch, caplog
):
    layer, handle = patched_toy()
    tried = []
    monkeypatch.setattr(route.Executor, "run", breaking(OutOfResources("shared memory"), tried))
    q, k, v = qkv()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(layer(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert len(tried) == 1
    calls, fallbacks = counts(handle)
    assert sum(calls.values()) == 0
    ((reason, count),) = fallbacks.items()
    assert count == 3
    assert reason.cause is Fallback.BUILD_FAILED
    assert str(reason) == "the kernel cannot be built here (OutOfResources: shared memory)"
    assert sum(str(reason) in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("error", "strict"),
    [(RuntimeError("CUDA error: an illegal memory access"), False), (OutOfResources("x"), True)],
)
def test_what_fails_while_it_runs_or_in_strict_mode_is_raised(monkeypatch, error, strict):
    layer, _ = patched_toy(on_unsupported="error" if strict else "fallback")
    monkeypatch.setattr(route.Executor, "run", breaking(error, []))
    with pytest.raises(type(error)):
        layer(*qkv())


def test_components_may_be_any_iterable_but_not_empty():
    layer = ToyAttention(Direct())
    with pytest.raises(PatchError, match="components is empty"):
        patch(layer, components=[])
    with patched(layer, kernel="sage", components=(name for name in ("model",))) as handle:
        assert list(handle.components) == ["model"]


def test_a_known_call_is_looked_at_once(monkeypatch):
    layer, handle = patched_toy()
    q, k, v = qkv()
    first = layer(q, k, v)
    monkeypatch.setattr(route, "obstacle", lambda *_: pytest.fail("a known call is known"))
    assert torch.equal(layer(q, k, v), first)
    assert counts(handle) == ({"sage:emulation": 2}, {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"min_seq": 4096}, Fallback.SHORTER_THAN_MIN_SEQ),
        ({"kernel": "fav2"}, None),
        ({"kernel": "sdpa"}, None),
    ],
    ids=str,
)
def test_a_known_call_heeds_what_a_later_patch_says(change, reason):
    layer, _ = patched_toy()
    q, k, v = qkv()
    layer(q, k, v)
    handle = patch(layer, **({"kernel": "sage", "min_seq": 0} | change))
    layer(q, k, v)
    calls, fallbacks = counts(handle)
    if reason is not None:
        assert [one.cause for one in fallbacks] == [reason]
    else:
        assert [label.split(":")[0] for label in calls] == [change["kernel"]]


def test_a_known_call_heeds_switches_modes_and_gradients(monkeypatch):
    layer, _ = patched_toy()
    q, k, v = qkv()
    ours = layer(q, k, v)
    exact = F.scaled_dot_product_attention(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(q, k, v).dtype == torch.bfloat16
    assert torch.equal(layer(q.requires_grad_(), k, v).detach(), exact)
    q.requires_grad_(False)
    assert torch.equal(layer(q, k, v), ours)
    monkeypatch.setenv("SAGE_PLUGIN_DISABLE", "1")
    patch(layer, kernel="sage", min_seq=0)
    assert torch.equal(layer(q, k, v), exact)
