"""`refresh`: what changed since `patch` is patched again, and nothing is forgotten."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from diffusers.models.attention_processor import (
    AttnProcessor2_0,
    CogVideoXAttnProcessor2_0,
)
from torch._dynamo.testing import CompileCounter

import sage_plugin
from sage_plugin.errors import PatchError
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.plugin import route
from sage_plugin.plugin.patch import handle_of, patch, refresh, unpatch
from tests.plugin.tiny import CALLS, Pipeline, tiny
from tests.plugin.toys import ByProduct, Direct, ToyAttention, generated, qkv, sage

pytestmark = pytest.mark.usefixtures("one_thread")


def test_refresh_patches_again_at_once_with_the_settings_in_force():
    model = tiny("unet")
    handle = patch(model.module, kernel="sage", min_seq=0, exclude="*attn2")
    ours = model.run()
    model.module.set_attn_processor(AttnProcessor2_0())
    assert len(handle.report().lost) == CALLS["unet"] // 2
    assert refresh(model.module) is handle
    assert handle.report().lost == ()
    assert torch.equal(model.run(), ours)
    report = handle.report()
    assert report.kernel_calls() == CALLS["unet"]
    assert all(name.endswith("attn2") for name in report.skipped)


def test_report_103_refresh_mends_a_compiled_model_which_cannot_notice():
    model = tiny("cogx")
    host = model.run()
    handle = sage(model.module)
    counter = CompileCounter()
    compiled = torch.compile(model.module, backend=counter, fullgraph=True)
    ours = model.run(compiled)
    assert not torch.equal(ours, host)
    for block in model.module.transformer_blocks:
        block.attn1.set_processor(CogVideoXAttnProcessor2_0())
    assert torch.equal(model.run(compiled), host)
    assert refresh(compiled) is handle
    assert torch.equal(model.run(compiled), ours)
    assert counter.frame_count == 2  # the graph of the patched model is found again
    torch._dynamo.reset()


def test_refresh_patches_attention_that_came_in_since():
    model = nn.ModuleDict({"first": ToyAttention(Direct()), "second": ToyAttention(ByProduct())})
    handle = sage(model)
    model["third"] = ToyAttention(Direct())
    model["first"] = ToyAttention(Direct())  # another module in its place
    model["second"].processor = Direct()
    outputs = [layer(*qkv()) for layer in model.values()]
    assert handle.report().total_calls() == 0
    refresh(model)
    assert handle.report().skipped == {}
    for layer, output in zip(model.values(), outputs, strict=True):
        assert not torch.equal(layer(*qkv()), output)
    assert {row.layer: row.calls for row in handle.report().rows} == {
        f"model.{name}": {"sage:emulation": 1} for name in ("first", "second", "third")
    }
    del model["third"]
    refresh(model)
    assert set(handle.layers) == {"model.first", "model.second"}
    unpatch(model)
    assert generated(model) == []
    assert torch.equal(model["first"](*qkv()), outputs[0])


def test_refresh_follows_a_patched_processor_into_another_module():
    model = nn.ModuleDict({"attn": ToyAttention(Direct())})
    handle = sage(model)
    model["attn"] = ToyAttention(model["attn"].processor)
    refresh(model)
    model["attn"](*qkv())
    assert handle.report().kernel_calls() == 1
    model["attn"].processor = Direct()
    assert handle.report().lost == ("model.attn",)


def test_refresh_forgets_neither_reasons_nor_broken_layers(caplog):
    layer = ToyAttention(Direct())
    handle = patch(layer, kernel="sage", min_seq=100)
    with caplog.at_level(logging.WARNING, "sage_plugin"):
        layer(*qkv())
        handle.layers["model"].broken = route.NOT_FINITE
        refresh(layer)
        layer(*qkv())
    assert len(caplog.records) == 2
    assert handle.report().rows[0].fallbacks == {
        FallbackReason(Fallback.SHORTER_THAN_MIN_SEQ, 100): 1,
        route.NOT_FINITE: 1,
    }


def test_refresh_goes_through_a_pipeline_and_refuses_what_is_not_patched():
    first, second = tiny("cogx"), tiny("cogx")
    pipe = Pipeline(transformer=first.module, transformer_2=second.module)
    handle = sage(pipe)
    for module in (first.module, second.module):
        module.fuse_qkv_projections()
    assert refresh(pipe) is handle
    assert handle.report().lost == ()
    unpatch(pipe)
    for obj in (pipe, first.module):
        with pytest.raises(PatchError, match=r"not patched.*call sage_plugin\.patch\(\) on it"):
            sage_plugin.refresh(obj)
    with pytest.raises(PatchError, match="got int"):
        refresh(42)


def test_refresh_leaves_what_is_patched_by_itself():
    model, other = nn.ModuleDict({"own": ToyAttention(Direct())}), ToyAttention(Direct())
    handle = sage(model)
    sage(other)
    model["other"] = other
    with pytest.raises(PatchError, match=r"model\.other is patched already.*unpatch"):
        refresh(model)
    assert set(handle.layers) == {"model.own"}
    assert handle_of(other) is not handle
