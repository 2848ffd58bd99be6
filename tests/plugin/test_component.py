"""A patch that is lost because somebody replaces processors is noticed and mended."""

from __future__ import annotations

import logging

import pytest
import torch

pytest.importorskip("diffusers")

from sage_plugin.plugin.patch import patch, unpatch
from tests.plugin.tiny import CALLS, tiny
from tests.plugin.toys import ByProduct, Direct, ToyAttention, processors, qkv


def test_report_100_fused_projections_are_patched_again(caplog):
    model = tiny("cogx")
    before, objects = model.run(), processors(model.module)
    handle = patch(model.module, kernel="sage", min_seq=0)
    sage = model.run()
    model.module.fuse_qkv_projections()  # one new instance for all layers
    assert handle.report().lost == tuple(handle.layers)
    with caplog.at_level(logging.WARNING, "sage_plugin"):
        fused = model.run()
        model.run()
    assert sum("replaced after patching" in r.message for r in caplog.records) == 1
    assert "2 are patched again" in caplog.text
    assert handle.report().lost == ()
    assert handle.report().kernel_calls() == 3 * CALLS["cogx"]
    torch.testing.assert_close(fused, sage, rtol=0, atol=1e-2)
    assert not torch.equal(fused, before)

    unpatch(model.module)  # while fused
    assert {type(p).__name__ for p in processors(model.module)} == {
        "FusedCogVideoXAttnProcessor2_0"
    }
    assert len({id(p) for p in processors(model.module)}) == 1  # the shared one again
    model.module.unfuse_qkv_projections()
    assert [type(p) for p in processors(model.module)] == [type(p) for p in objects]
    assert torch.equal(model.run(), before)


def test_fusing_a_dispatching_model_keeps_the_patch():
    model = tiny("wan")
    handle = patch(model.module, kernel="sage", min_seq=0)
    model.module.fuse_qkv_projections()
    assert handle.report().lost == ()
    model.run()
    assert handle.report().kernel_calls() == CALLS["wan"]


def test_processors_saved_before_the_patch_and_set_again_are_patched_again():
    model = tiny("unet")
    saved = dict(model.module.attn_processors)
    handle = patch(model.module, kernel="sage", min_seq=0)
    model.module.set_attn_processor(dict(saved))
    model.run()
    assert handle.report().kernel_calls() == CALLS["unet"]
    unpatch(model.module)
    assert all(model.module.attn_processors[name] is p for name, p in saved.items())


def test_one_patched_processor_set_for_all_layers_counts_for_each_its_own():
    model = tiny("unet")
    handle = patch(model.module, kernel="sage", min_seq=0)
    model.module.set_attn_processor(next(iter(model.module.attn_processors.values())))
    model.run()
    assert [row.total_calls() for row in handle.report().rows] == [1] * CALLS["unet"]
    unpatch(model.module)
    assert len({id(p) for p in processors(model.module)}) == 1
    assert not any("_sage" in key for key in vars(processors(model.module)[0]))


def test_a_replacement_that_cannot_be_patched_is_listed_and_warned_of_once(caplog):
    layer = ToyAttention(Direct())
    handle = patch(layer, kernel="sage", min_seq=0)
    replacement = layer.processor = ByProduct()
    with caplog.at_level(logging.WARNING, "sage_plugin"):
        layer(*qkv())
        layer(*qkv())
        replacement = layer.processor = ByProduct()
        layer(*qkv())
    assert len(caplog.records) == 1
    assert "1 cannot be" in caplog.text
    report = handle.report()
    assert report.lost == ("model",)
    assert "patch lost: model" in report.text()
    unpatch(layer)
    assert layer.processor is replacement


def test_processors_exchanged_between_layers_follow_their_layers():
    model = tiny("wan")
    before = model.run()
    handle = patch(model.module, kernel="sage", min_seq=0)
    first, second = (block.attn1 for block in model.module.blocks)
    first.processor, second.processor = second.processor, first.processor
    model.run()
    assert [row.total_calls() for row in handle.report().rows] == [1] * CALLS["wan"]
    unpatch(model.module)
    assert torch.equal(model.run(), before)
    assert not any("_sage" in key for p in processors(model.module) for key in vars(p))


def test_a_second_patch_mends_too():
    model = tiny("cogx")
    before = model.run()
    handle = patch(model.module, kernel="sage", min_seq=0)
    model.module.fuse_qkv_projections()
    assert patch(model.module, kernel="sage", min_seq=0) is handle
    assert handle.report().lost == ()
    assert len(handle.layers) == CALLS["cogx"]
    model.module.unfuse_qkv_projections()
    model.run()
    assert handle.report().lost == ()
    assert handle.report().kernel_calls() == CALLS["cogx"]
    unpatch(model.module)
    assert torch.equal(model.run(), before)
