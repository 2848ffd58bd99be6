"""What happens to a patched model in its life: adapters, offload, caches, casts, copies, files."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers import FasterCacheConfig, FirstBlockCacheConfig, PyramidAttentionBroadcastConfig
from diffusers.hooks import HookRegistry
from diffusers.hooks import ModelHook as DiffusersHook
from diffusers.loaders import IPAdapterMixin
from diffusers.models.attention_processor import (
    Attention,
)

from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.plugin.patch import handle_of, patch, patched, unpatch
from tests.plugin import tiny_transformers
from tests.plugin.tiny import CALLS, Tiny, random, tiny
from tests.plugin.toys import generated, sage

FLOAT8, CPU = torch.float8_e4m3fn, torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


def cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    def of(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(of, x))
        return x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x

    return {name: of(x) for name, x in inputs.items()}


# -- features that wrap modules ----------------------------------------------------------------


@dataclass(frozen=True)
class Feature:
    """Something that diffusers, accelerate or PEFT does to a model.

    Attributes:
        put: does it.
        calls: kernel calls of `run`.
        run: the model's output.
        name: the tiny model.
        same: whether it leaves outputs as they are.
    """

    put: Callable[[nn.Module], object]
    calls: int = CALLS["cogx"]
    run: Callable[[Tiny], torch.Tensor] = Tiny.run
    name: str = "cogx"
    same: bool = False


def adapter(module: nn.Module) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=2, lora_alpha=8, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False
    )
    module.add_adapter(config, adapter_name="style")
    module.eval()


def grouped(kind: str) -> Callable[[nn.Module], object]:
    return lambda module: module.enable_group_offload(
        CPU, offload_type=kind, num_blocks_per_group=1
    )


def hook_attention(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, Attention):
            add_hook_to_module(child, ModelHook())


def casting(dtype: torch.dtype) -> Callable[[nn.Module], object]:
    return lambda module: module.to(dtype).enable_layerwise_casting(FLOAT8, dtype)


def in_bfloat16(model: Tiny) -> torch.Tensor:
    return model.run(**cast(model.inputs, torch.bfloat16))


def broadcast(module: nn.Module) -> None:
    module.enable_cache(
        PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=3, spatial_attention_timestep_skip_range=(-1, 9),
            spatial_attention_block_identifiers=("blocks",), current_timestep_callback=lambda: 0,
        )
    )  # fmt: skip


def faster(module: nn.Module) -> None:
    """Skips the second of three steps."""
    module.enable_cache(
        FasterCacheConfig(
            spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(0, 9),
            attention_weight_callback=lambda _: 0.3, current_timestep_callback=lambda: module.step,
            tensor_format="BFCHW", is_guidance_distilled=True,
        )
    )  # fmt: skip


def three_steps(model: Tiny) -> torch.Tensor:
    outputs = []
    with model.module.cache_context("step"):
        for model.module.step in range(3):
            latents = model.inputs["hidden_states"] * (1 + 0.1 * model.module.step)
            outputs.append(model.run(hidden_states=latents))
    model.module._reset_stateful_cache()
    return torch.stack(outputs)


FIRST_BLOCK = FirstBlockCacheConfig(threshold=10.0)
FEATURES = {
    "adapter": Feature(adapter),
    "group offload of blocks": Feature(grouped("block_level"), same=True),
    "group offload of leaves": Feature(grouped("leaf_level"), same=True),
    "sequential offload": Feature(lambda m: accelerate.cpu_offload(m, CPU), same=True),
    "model offload": Feature(lambda m: accelerate.cpu_offload_with_hook(m, CPU), same=True),
    "a device map": Feature(
        lambda m: accelerate.dispatch_model(m, {"": "cpu"}, force_hooks=True), same=True
    ),
    "hooks of attention": Feature(hook_attention, same=True),
    "casts to float32": Feature(casting(torch.float32)),
    "casts to bfloat16": Feature(casting(torch.bfloat16), run=in_bfloat16),
    "casts of wan": Feature(casting(torch.float32), CALLS["wan"], name="wan"),
    # The first block runs three times, the other once.
    "first block cache": Feature(lambda m: m.enable_cache(FIRST_BLOCK), 3 + 1, three_steps),
    "pyramid attention broadcast": Feature(broadcast, CALLS["cogx"], three_steps),
    # Only the self-attentions are skipped.
    "pyramid attention broadcast of wan": Feature(broadcast, 2 + 2 * 3, three_steps, "wan"),
    "faster cache": Feature(faster, 2 * CALLS["cogx"], three_steps),
}


@pytest.mark.parametrize("first", ["patch", "feature"])
@pytest.mark.parametrize("name", FEATURES)
def test_report_100_the_patch_and_a_feature_keep_each_other(name, first):
    feature = FEATURES[name]
    model, plain = tiny(feature.name), tiny(feature.name)
    handle = sage(model.module) if first == "patch" else None
    for module in (model.module, plain.module):
        feature.put(module)
    handle = handle or sage(model.module)
    host, ours = feature.run(plain), feature.run(model)
    assert handle.report().kernel_calls() == feature.calls
    assert handle.report().lost == ()
    assert 0 < (ours - host).abs().sum() < 0.05 * host.abs().sum()
    if feature.same:
        bare = tiny(feature.name)
        sage(bare.module)
        assert torch.equal(ours, bare.run())
    patch(model.module, kernel="sdpa", min_seq=0)
    assert torch.equal(feature.run(model), host)
    unpatch(model.module)
    assert torch.equal(feature.run(model), host)
    assert generated(model.module) == []


def test_report_100_adapters_of_peft_come_and_go_on_a_patched_model():
    model, plain = tiny("cogx"), tiny("cogx")
    handle = sage(model.module)
    bare = model.run()
    changes = (
        adapter,
        lambda m: m.disable_adapters(),
        lambda m: m.enable_adapters(),
        lambda m: m.fuse_lora(),
        lambda m: m.unfuse_lora(),
        lambda m: m.delete_adapters("style"),
    )
    ours = []
    for change in changes:
        change(model.module)
        change(plain.module)
        ours.append(model.run())
        with patched(model.module, kernel="sdpa", min_seq=0):
            assert torch.equal(model.run(), plain.run())
    assert handle.report().kernel_calls() == (1 + len(changes)) * CALLS["cogx"]
    assert torch.equal(ours[1], bare)
    assert torch.equal(ours[2], ours[0])
    assert not torch.equal(ours[0], bare)
    torch.testing.assert_close(ours[5], bare, rtol=0, atol=1e-3)
    unpatch(model.module)
    assert torch.equal(model.run(), plain.run())


# -- hooks that keep the `forward` of an attention module ---------------------------------------


def accelerate_hooks(module: nn.Module) -> None:
    add_hook_to_module(module, ModelHook())


def diffusers_hooks(module: nn.Module) -> None:
    for name in ("outer", "inner"):
        HookRegistry.check_if_exists_or_initialize(module).register_hook(DiffusersHook(), name)


HOOKS = {
    accelerate_hooks: remove_hook_from_module,
    diffusers_hooks: lambda m: [m._diffusers_hook.remove_hook(n) for n in ("inner", "outer")],
}


@pytest.mark.parametrize("first", ["patch", "hook"])
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_report_100_hooks_of_modules_that_attend_themselves_and_the_patch_keep_each_other(
    hook, first
):
    model = tiny_transformers.tiny("llama")
    layers = [layer.self_attn for layer in model.module.model.layers]
    host, kinds = model.run(), [type(layer) for layer in layers]

    def put_hooks():
        for layer in layers:
            hook(layer)

    if first == "hook":
        put_hooks()
    handle = sage(model.module)
    if first == "patch":
        put_hooks()
    ours = model.run()
    assert handle.report().kernel_calls() == 2
    assert not torch.equal(ours, host)
    unpatch(model.module)
    assert torch.equal(model.run(), host)
    sage(model.module)
    assert torch.equal(model.run(), ours)
    for layer in layers:
        HOOKS[hook](layer)
    assert torch.equal(model.run(), ours)
    unpatch(model.module)
    assert torch.equal(model.run(), host)
    assert [type(layer) for layer in layers] == kinds
    assert [layer.forward.__func__ for layer in layers] == [kind.forward for kind in kinds]


def test_a_copy_of_a_model_that_was_hooked_and_patched_is_unpatched():
    model = tiny_transformers.tiny("llama")
    host = model.run()
    for layer in model.module.model.layers:
        accelerate_hooks(layer.self_attn)
    handle = sage(model.module)
    twin = tiny_transformers.Tiny(copy.deepcopy(model.module), model.inputs)
    assert torch.equal(twin.run(), host)
    assert handle.report().total_calls() == 0
    sage(twin.module)
    assert torch.equal(twin.run(), model.run())
    assert handle.report().kernel_calls() == 2


def test_a_forward_of_somebody_else_s_is_left_alone_and_named():
    model = tiny_transformers.tiny("llama")
    host, layer = model.run(), model.module.model.layers[0].self_attn
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    handle = sage(model.module)
    model.run()
    report = handle.report()
    assert [row.layer for row in report.rows] == ["model.model.layers.1.self_attn"]
    assert report.kernel_calls() == 1
    assert "forward" in report.skipped["model.model.layers.0.self_attn"]
    unpatch(model.module)
    assert torch.equal(model.run(), host)


# -- features that replace processors ----------------------------------------------------------


def image_adapter(unet: nn.Module) -> dict[str, Any]:
    """Weights of an IP-Adapter with four tokens."""
    draw, width = torch.Generator().manual_seed(7), 16
    crosses = [n for n in unet.attn_processors if n.endswith("attn2.processor")]

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    return {
        "image_proj": {
            "proj.weight": weight(4 * width, width), "proj.bias": weight(4 * width),
            "norm.weight": weight(width), "norm.bias": weight(width),
        },
        "ip_adapter": {
            f"{2 * i + 1}.to_{part}_ip.weight": weight(32, width)
            for i in range(len(crosses)) for part in "kv"
        },
    }  # fmt: skip


class ImagePipeline(IPAdapterMixin):
    def __init__(self, unet: nn.Module) -> None:
        self.unet, self.safety_checker = unet, None


IMAGE = {"added_cond_kwargs": {"image_embeds": [random(1, 1, 16)]}}


def test_report_100_an_ip_adapter_is_loaded_and_unloaded_on_a_patched_model():
    model, plain = tiny("unet"), tiny("unet")
    host = plain.run()
    kinds = [type(p) for p in plain.module.attn_processors.values()]
    plain.module._load_ip_adapter_weights([image_adapter(plain.module)])
    adapted = plain.run(**IMAGE)

    handle = sage(model.module)
    ours = model.run()
    model.module._load_ip_adapter_weights([image_adapter(model.module)])
    near = model.run(**IMAGE)
    assert handle.report().kernel_calls() == CALLS["unet"] + CALLS["unet"] + CALLS["unet"] // 2
    assert 0 < (near - adapted).abs().max() < 0.1 * (adapted - host).abs().max()
    ImagePipeline(model.module).unload_ip_adapter()
    assert torch.equal(model.run(), ours)
    assert handle.report().lost == ()
    model.module._load_ip_adapter_weights([image_adapter(model.module)])
    unpatch(model.module)  # before a forward could notice
    assert generated(model.module) == []
    assert torch.equal(model.run(**IMAGE), adapted)
    sage(model.module)
    ImagePipeline(model.module).unload_ip_adapter()
    model.run()
    unpatch(model.module)
    assert [type(p) for p in model.module.attn_processors.values()] == kinds
    assert torch.equal(model.run(), host)


def test_report_100_sliced_attention_is_named_and_runs_as_it_is(caplog):
    model, plain = tiny("unet"), tiny("unet")
    handle = sage(model.module)
    ours = model.run()
    for module in (model.module, plain.module):
        module.set_attention_slice("max")
    assert handle.report().lost == tuple(handle.layers)
    with caplog.at_level(logging.WARNING, "sage_plugin"):
        assert torch.equal(model.run(), plain.run())
    assert "8 cannot be and run the host's attention" in caplog.text
    report = handle.report()
    assert report.kernel_calls() == CALLS["unet"]
    assert set(report.lost) == set(report.skipped) == set(handle.layers)
    model.module.set_attention_slice(None)
    assert torch.equal(model.run(), ours)
    assert handle.report().lost == ()
    assert handle.report().skipped == {}
    assert handle.report().kernel_calls() == 2 * CALLS["unet"]


def test_set_default_attn_processor_is_refused_by_diffusers_until_unpatch():
    model = tiny("unet")
    handle = sage(model.module)
    with pytest.raises(ValueError, match="Cannot call `set_default_attn_processor`"):
        model.module.set_default_attn_processor()
    model.run()
    assert handle.report().kernel_calls() == CALLS["unet"]
    unpatch(model.module)
    model.module.set_default_attn_processor()


# -- training, copies, files -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cogx", "flux"])
def test_report_95_gradients_with_checkpoints_are_those_of_the_unpatched_model(name):
    model, plain = tiny(name), tiny(name)
    handle = sage(model.module)
    for one in (model, plain):
        one.module.train().enable_gradient_checkpointing()
        one.module(**one.inputs)[0].square().sum().backward()
    for ours, host in zip(model.module.parameters(), plain.module.parameters(), strict=True):
        assert (ours.grad is None) == (host.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, host.grad)
    # A checkpoint runs its block twice.
    reason = {FallbackReason(Fallback.GRADIENT): 2}
    assert [row.fallbacks for row in handle.report().rows] == [reason] * CALLS[name]
    model.module.eval()
    model.run()
    assert handle.report().kernel_calls() == CALLS[name]


def saved_and_loaded(module, folder):
    module.save_pretrained(folder)
    return type(module).from_pretrained(folder).eval()


COPIES = {
    "copy": lambda module, folder: copy.deepcopy(module),
    "pickle": lambda module, folder: pickle.loads(pickle.dumps(module)),
    "file": saved_and_loaded,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", ["cogx", "wan"])
def test_a_copy_of_any_kind_is_the_unpatched_model(name, way, tmp_path):
    model = tiny(name)
    host = model.run()
    handle = sage(model.module)
    twin = COPIES[way](model.module, tmp_path)
    assert handle_of(twin) is None
    assert generated(twin) == []
    assert torch.equal(model.run(twin), host)
    assert handle.report().total_calls() == 0
    state = twin.state_dict()
    assert list(state) == list(model.module.state_dict())
    assert all(torch.equal(state[key], value) for key, value in model.module.state_dict().items())
    sage(twin)
    model.run(twin)
    assert handle.report().total_calls() == 0
    model.run()
    assert handle.report().kernel_calls() == CALLS[name]


def test_files_of_a_patched_model_are_those_of_the_unpatched_one(tmp_path):
    model = tiny("cogx")
    model.module.save_pretrained(tmp_path / "plain")
    sage(model.module)
    model.module.save_pretrained(tmp_path / "patched")
    plain, ours = (
        {file.name: file.read_bytes() for file in sorted((tmp_path / name).iterdir())}
        for name in ("plain", "patched")
    )
    assert "config.json" in plain
    assert "_class_name" in json.loads(plain["config.json"])
    assert ours == plain


def test_a_pickle_of_a_patched_model_names_no_class_of_ours():
    module = tiny("cogx").module
    sage(module)
    assert b"Sage" not in pickle.dumps(module)


CHANGES = {
    "to": lambda module: module.to(torch.bfloat16),
    "half": lambda module: module.half(),
    "half and back": lambda module: module.half().float(),
    "train and eval": lambda module: module.train().eval(),
    "load_state_dict": lambda module: module.load_state_dict(
        {key: 1.1 * value for key, value in module.state_dict().items()}
    ),
    "requires_grad_": lambda module: module.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_weights_or_mode_keeps_the_patch(change):
    model, plain = tiny("cogx"), tiny("cogx")
    handle = sage(model.module)
    for one in (model, plain):
        CHANGES[change](one.module)
        one.inputs = cast(one.inputs, one.module.dtype)
    ours, host = model.run(), plain.run()
    assert handle.report().kernel_calls() == CALLS["cogx"]
    assert ours.dtype == host.dtype == model.module.dtype
    assert 0 < (ours - host).abs().sum() < 0.05 * host.abs().sum()
    unpatch(model.module)
    assert torch.equal(model.run(), host)
