"""Patching whole models: what runs, what stays as it was, and how it is undone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("diffusers")

from diffusers.models.attention_dispatch import _AttentionBackendRegistry

import sage_plugin
from sage_plugin.errors import ConfigError, PatchError, UnknownKernelError, UsageError
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.plugin.hosts.diffusers import find_denoisers, has_attention
from sage_plugin.plugin.patch import PatchHandle, handle_of, patch, patched, refresh, unpatch
from tests.plugin import tiny_transformers
from tests.plugin.tiny import CALLS, Pipeline, random, tiny, vae
from tests.plugin.toys import ByProduct, Direct, ToyAttention, generated, processors, qkv


@pytest.mark.parametrize("name", CALLS)
def test_a_forward_makes_the_expected_calls_and_unpatch_restores_everything(name):
    model = tiny(name)
    before, keys = model.run(), list(model.module.state_dict())
    objects, sdpa = processors(model.module), F.scaled_dot_product_attention

    handle = patch(model.module, kernel="sdpa", min_seq=0)
    assert torch.equal(model.run(), before)
    assert handle.report().total_calls() == CALLS[name]
    assert all(row.calls == {"sdpa:host": 1} for row in handle.report().rows)

    patch(model.module, kernel="sage", min_seq=0)
    error = (model.run() - before).abs().sum() / before.abs().sum()
    assert 0 < error < 0.02
    assert handle.report().kernel_calls() == CALLS[name]
    assert list(model.module.state_dict()) == keys
    assert all(
        isinstance(ours, type(original)) and ours is not original
        for ours, original in zip(processors(model.module), objects, strict=True)
    )

    unpatch(model.module)
    assert torch.equal(model.run(), before)
    assert all(a is b for a, b in zip(processors(model.module), objects, strict=True))
    assert list(model.module.state_dict()) == keys
    assert not model.module._forward_pre_hooks
    assert F.scaled_dot_product_attention is sdpa


@pytest.mark.parametrize("name", ["cogx", "wan"])
def test_report_96_sdpa_function_is_untouched(name):
    other, model, sdpa = tiny(name), tiny(name), F.scaled_dot_product_attention
    before = other.run()
    kinds = [type(p) for p in processors(other.module)]
    patch(model.module, kernel="sage", min_seq=0)
    assert F.scaled_dot_product_attention is sdpa
    assert torch.nn.functional.scaled_dot_product_attention is sdpa
    assert not torch.equal(model.run(), before)
    assert torch.equal(other.run(), before)
    assert [type(p) for p in processors(other.module)] == kinds


def test_report_97_vae_and_text_encoder_are_left_alone():
    model, control = tiny("cogx"), vae()
    pipe = Pipeline(transformer=model.module, vae=control, text_encoder=text_encoder(), scale=1.5)
    assert has_attention(control)  # so that leaving it alone is a choice
    latents = random(1, 4, 8, 8)
    with torch.no_grad():
        before = control.decode(latents).sample
        objects = processors(control)
        handle = patch(pipe, kernel="sage", min_seq=0)
        assert torch.equal(control.decode(latents).sample, before)
    assert list(handle.components) == ["transformer"]
    assert handle.report().total_calls() == 0
    assert all(a is b for a, b in zip(processors(control), objects, strict=True))
    model.run()
    assert handle.report().kernel_calls() == CALLS["cogx"]


def test_report_98_the_backend_of_diffusers_is_untouched():
    model, other = tiny("wan"), tiny("wan")
    before, backend = other.run(), _AttentionBackendRegistry.get_active_backend()
    patch(model.module, kernel="sage", min_seq=0)
    model.run()
    assert _AttentionBackendRegistry.get_active_backend() == backend
    assert torch.equal(other.run(), before)
    unpatch(model.module)
    assert _AttentionBackendRegistry.get_active_backend() == backend
    assert all(p._attention_backend is None for p in processors(model.module))


def test_report_100_processors_without_an_attention_call_are_skipped_and_listed():
    known, unknown = ToyAttention(Direct()), ToyAttention(ByProduct())
    objects = known.processor, unknown.processor
    model = nn.ModuleDict({"known": known, "unknown": unknown})
    handle = patch(model, kernel="sage", min_seq=0)
    q, k, v = qkv()
    known(q, k, v)
    unknown(q, k, v)
    report = handle.report()
    assert [row.layer for row in report.rows] == ["model.known"]
    assert "no attention call" in report.skipped["model.unknown"]
    assert unknown.processor is objects[1]
    unpatch(model)
    assert (known.processor, unknown.processor) == objects


def test_report_101_patching_twice_is_patching_once():
    model = tiny("cogx")
    before, objects = model.run(), processors(model.module)
    handle = patch(model.module, kernel="sage", min_seq=0)
    once, ours = model.run(), processors(model.module)
    assert patch(model.module, kernel="sage", min_seq=0) is handle
    assert all(a is b for a, b in zip(processors(model.module), ours, strict=True))
    assert torch.equal(model.run(), once)
    assert handle.report().total_calls() == CALLS["cogx"]  # counted anew
    assert len(model.module._forward_pre_hooks) == 1
    unpatch(model.module)
    unpatch(model.module)
    handle.unpatch()
    assert torch.equal(model.run(), before)
    assert all(a is b for a, b in zip(processors(model.module), objects, strict=True))
    assert handle_of(model.module) is None


def test_report_101_the_context_manager_restores_after_an_exception():
    model = tiny("wan")
    before = model.run()
    for way in (patched, patch):
        with pytest.raises(RuntimeError), way(model.module, kernel="sage", min_seq=0):
            model.run(hidden_states=random(2, 5, 3, 8, 8))
        assert handle_of(model.module) is None
        assert torch.equal(model.run(), before)


def test_patched_gives_an_earlier_patch_its_settings_back():
    model = tiny("wan")
    handle = patch(model.module, kernel="sage", min_seq=0, exclude="*attn2")
    sage = model.run()
    with patched(model.module, kernel="sdpa") as inner:
        assert inner.layers == handle.layers
        host = model.run()
        assert len(handle.layers) == 4
    assert len(handle.layers) == 2
    assert torch.equal(model.run(), sage)
    unpatch(model.module)
    assert torch.equal(model.run(), host)


def test_report_102_cross_attention_to_a_short_text_stays_on_the_host():
    model = tiny("wan")
    handle = patch(model.module, kernel="sage", min_seq=13)  # 48 video tokens, 12 of text
    model.run()
    for row in handle.report().rows:
        if row.layer.endswith("attn1"):
            assert row.calls == {"sage:emulation": 1}
        else:
            assert row.fallbacks == {FallbackReason(Fallback.SHORTER_THAN_MIN_SEQ, 13): 1}


def test_autocast_and_half_models():
    model = tiny("cogx")
    patch(model.module, kernel="sage", min_seq=0)
    exact = model.run()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model.run()
    assert handle_of(model.module).report().kernel_calls() == 2 * CALLS["cogx"]
    assert (mixed - exact).abs().max() < 0.1
    model.module.bfloat16()
    half = {k: v.bfloat16() for k, v in model.inputs.items() if k.endswith("hidden_states")}
    assert model.run(**half).dtype == torch.bfloat16


def test_shared_processors_get_a_twin_a_layer_and_the_shared_object_comes_back():
    model = tiny("sd3")
    found = processors(model.module)
    assert len({id(p) for p in found}) == 2 < len(found)  # dual attention shares one
    handle = patch(model.module, kernel="sage", min_seq=0)
    assert len({id(p) for p in processors(model.module)}) == 3
    model.run()
    assert [row.calls for row in handle.report().rows] == [{"sage:emulation": 1}] * 3
    unpatch(model.module)
    assert all(a is b for a, b in zip(processors(model.module), found, strict=True))


def test_report_50_layers_are_chosen_by_globs_with_or_without_the_component():
    model = tiny("wan")
    everything = {f"transformer.blocks.{i}.attn{j}" for i in (0, 1) for j in (1, 2)}
    for options, expected in (
        ({}, everything),
        ({"include": "*.attn1"}, {n for n in everything if n.endswith("attn1")}),
        ({"include": ["blocks.0.*"]}, {n for n in everything if ".0." in n}),
        ({"exclude": "transformer.blocks.0.*"}, {n for n in everything if ".1." in n}),
        ({"include": "*.attn2", "exclude": ("blocks.1*",)}, {"transformer.blocks.0.attn2"}),
    ):
        handle = patch(model.module, kernel="sage", min_seq=0, **options)
        assert set(handle.layers) == expected
        assert len(generated(model.module)) == len(expected)
        assert set(handle.report().skipped) == everything - expected
    before = set(handle.layers)
    with pytest.raises(PatchError, match=r"blocks\.9.*of 4 attention layers"):
        patch(model.module, include="blocks.9*")
    assert set(handle.layers) == before  # a failed patch changes nothing
    assert next(iter(handle.layers.values())).state.options.kernel == "sage"


def test_a_failed_first_patch_leaves_nothing():
    model = tiny("wan")
    objects = processors(model.module)
    with pytest.raises(PatchError):
        patch(model.module, include="nothing")
    assert all(a is b for a, b in zip(processors(model.module), objects, strict=True))
    assert handle_of(model.module) is None
    assert not model.module._forward_pre_hooks


def test_a_pipeline_with_two_transformers_is_one_patch():
    first, second = tiny("wan"), tiny("wan")
    pipe = Pipeline(transformer=first.module, transformer_2=second.module, vae=vae(), unet=None)
    handle = patch(pipe, kernel="sage", min_seq=0)
    assert list(handle.components) == ["transformer", "transformer_2"]
    assert "transformer_2.blocks.0.attn1" in handle.layers
    second.run()
    ran = {row.layer for row in sage_plugin.report(pipe).rows if row.calls}
    assert ran == {n for n in handle.layers if n.startswith("transformer_2.")}
    assert handle_of(first.module) is handle_of(pipe) is handle
    unpatch(second.module)
    assert list(handle.components) == ["transformer"]
    unpatch(pipe)
    assert handle_of(pipe) is None
    assert handle.report().total_calls() == CALLS["wan"]
    assert len(handle.report().rows) == 2 * CALLS["wan"]


def test_a_model_patched_alone_joins_the_patch_of_its_pipeline():
    first, second = tiny("wan"), tiny("wan")
    pipe = Pipeline(transformer=first.module, transformer_2=second.module)
    alone = patch(second.module, kernel="sage", min_seq=0)
    assert next(iter(alone.layers)).startswith("transformer.")
    handle = patch(pipe, kernel="sdpa", min_seq=0)
    assert handle is alone
    assert list(handle.components) == ["transformer_2", "transformer"]
    before = second.run()
    assert handle.report().rows[0].layer.startswith("transformer_2.")
    handle.unpatch()
    assert torch.equal(second.run(), before)


def test_components_can_be_named():
    model, control = tiny("cogx"), vae()
    pipe = Pipeline(transformer=model.module, vae=control, scheduler=object())
    with pytest.raises(PatchError, match=r"'controlnet'.*transformer, vae"):
        patch(pipe, components=["controlnet"])
    handle = patch(pipe, components="vae", kernel="sdpa")
    assert list(handle.components) == ["vae"]
    with torch.no_grad():
        control.decode(random(1, 4, 8, 8))
    assert handle.report().total_calls() == 1
    unpatch(pipe)
    assert handle_of(pipe) is None


def test_denoisers_are_found_by_name_and_content():
    model = tiny("cogx").module
    unet = tiny("unet").module
    assert find_denoisers(model) == {"transformer": model}
    assert find_denoisers(torch.compile(unet)) == {"unet": unet}
    pipe = Pipeline(
        transformer=model, unet=unet, controlnet=unet, vae=vae(), transformer_3=nn.Linear(2, 2),
        decoder=vae(), prior=None,
    )  # fmt: skip
    assert find_denoisers(pipe) == {"transformer": model, "unet": unet}
    assert find_denoisers(object()) == {}
    assert find_denoisers(nn.Linear(2, 2)) == {}


def test_a_module_around_a_pipeline_patches_its_denoiser_only():
    model, control = tiny("cogx"), vae()
    around = nn.ModuleDict({"net": model.module, "vae": control, "text": text_encoder()})
    handle = patch(around, kernel="sage", min_seq=0)
    assert set(handle.layers) == {f"model.net.transformer_blocks.{i}.attn1" for i in (0, 1)}


def test_a_part_of_a_patched_model_is_not_patched_again():
    model = tiny("cogx")
    patch(model.module, kernel="sage")
    block = model.module.transformer_blocks[0]
    with pytest.raises(PatchError, match=r"transformer\.transformer_blocks\.0\.attn1.*unpatch"):
        patch(block)
    assert handle_of(block) is None
    unpatch(model.module)
    patch(block, kernel="sage")
    with pytest.raises(PatchError, match="unpatch"):
        patch(model.module)
    assert handle_of(model.module) is None
    assert len(handle_of(block).layers) == 1


def text_encoder():
    return tiny_transformers.tiny("clip text").module


def test_objects_without_attention_are_refused_in_one_sentence():
    for obj, words in (
        (nn.Linear(2, 2), "Linear contains no attention of diffusers or transformers"),
        (ToyAttention(ByProduct()), "contains no attention of diffusers or transformers"),
        (text_encoder().embeddings, "CLIPTextEmbeddings has no attention that looks"),
        (Pipeline(vae=vae(), text_encoder=text_encoder()), "no denoiser.*vae, text_encoder"),
        (42, "got int, expected a diffusers pipeline"),
        (tiny("cogx").module.__class__, "expected a diffusers pipeline"),
    ):
        with pytest.raises(PatchError, match=words) as caught:
            patch(obj)
        assert "\n" not in str(caught.value)
    for call in (unpatch, handle_of, sage_plugin.report):
        with pytest.raises(PatchError):
            call(42)


def test_a_transformers_model_around_a_diffusers_processor_is_patched():
    encoder = text_encoder()
    own = list(patch(encoder).layers)
    unpatch(encoder)
    encoder.extra = ToyAttention(Direct())
    assert set(patch(encoder).layers) == {"model.extra", *own}
    assert len(own) == 2


def test_bad_arguments_are_refused_at_patch_time():
    model = tiny("cogx").module
    for error, words, options in (
        (UnknownKernelError, r"'fa9'.*auto.*sdpa.*sage.*fav3_sage", {"kernel": "fa9"}),
        (UnknownKernelError, r"'hoper'.*portable.*hopper.*emulation", {"variant": "hoper"}),
        (UnknownKernelError, "'nope'", {"kernel": "sage:nope"}),
        (ConfigError, "'/nowhere' is not a folder", {"config_dir": "/nowhere"}),
        (UsageError, "kernel is None; it needs to be text", {"kernel": None}),
        (UsageError, "config_dir is 3; it needs to be a path", {"config_dir": 3}),
        (UsageError, "min_seq is -1", {"min_seq": -1}),
        (UsageError, "min_seq is '8'", {"min_seq": "8"}),
        (UsageError, "check_finite is 'no'; it needs to be True or", {"check_finite": "no"}),
        (UsageError, "keep_originals is 0; it needs", {"keep_originals": 0}),
        (UsageError, "include is 3; it is a glob", {"include": 3}),
        (UsageError, r"exclude is \[3\]; it is a glob", {"exclude": [3]}),
        (PatchError, "components is 3; it is a component's name", {"components": 3}),
        (ConfigError, "policy is list; give a file", {"policy": [1]}),
        (UsageError, "'warn'.*fallback, error", {"on_unsupported": "warn"}),
    ):
        with pytest.raises(error, match=words):
            patch(model, **options)
        assert handle_of(model) is None
    with pytest.raises(TypeError):
        patch(model, backend="sage")
    handle = patch(model, kernel="qk_int8:emulation")
    state = next(iter(handle.layers.values())).state
    assert (state.options.kernel, state.options.variant) == ("sage", "emulation")


def test_the_public_names_are_these():
    assert sage_plugin.patch is patch
    assert sage_plugin.refresh is refresh
    assert sage_plugin.unpatch is unpatch
    assert sage_plugin.patched is patched
    assert isinstance(sage_plugin.patch(tiny("cogx").module), PatchHandle)


def test_layer_skipping_of_diffusers_knows_the_generated_class():
    helpers = pytest.importorskip("diffusers.hooks._helpers")
    model = tiny("flux")
    registry = helpers.AttentionProcessorRegistry
    expected = registry.get(type(processors(model.module)[0]))
    patch(model.module)
    assert registry.get(type(processors(model.module)[0])) is expected


def test_importing_the_plugin_imports_no_host_library():
    code = (
        "import sys, sage_plugin; sage_plugin.patch, sage_plugin.report; "
        "print({'diffusers', 'transformers', 'safetensors'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
