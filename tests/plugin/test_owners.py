"""Who has a patch: found from inside and outside of wrappers, until the model is freed."""

from __future__ import annotations

import copy
import functools
import gc
import re
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from sage_plugin.errors import PatchError
from sage_plugin.plugin import twin
from sage_plugin.plugin.hosts import diffusers as host
from sage_plugin.plugin.patch import handle_of, patch, patched, refresh, unpatch
from sage_plugin.plugin.report import report
from tests.plugin import tiny_transformers
from tests.plugin.tiny import Pipeline, tiny
from tests.plugin.toys import Direct, ModuleProcessor, ToyAttention, generated, qkv, sage

pytestmark = pytest.mark.usefixtures("one_thread")


class Wrapper(nn.Module):
    """As `DistributedDataParallel` and FSDP have it: the model is `module`, and runs inside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs):
        return self.module(**inputs)


WRAPPERS = {
    "module": Wrapper,
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "both": lambda module: torch.compile(Wrapper(module), backend="eager"),
    "data parallel": nn.DataParallel,
}


def first(made):
    return made[0] if isinstance(made, tuple) else made.last_hidden_state


def output(model, module):
    with torch.no_grad():
        return first(module(**model.inputs))


@pytest.mark.parametrize("way", ["inside", "outside"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_report_132_a_patch_is_found_from_inside_and_outside_of_a_wrapper(name, way):
    model = tiny("cogx")
    inner, outer = model.module, WRAPPERS[name](model.module)
    exact, handle = output(model, inner), sage(inner if way == "inside" else outer)
    assert not torch.equal(output(model, inner), exact)
    for held in (inner, outer):
        assert report(held).kernel_calls() == handle.report().kernel_calls() == 2
        assert handle_of(held) is refresh(held) is handle
    assert patch(outer if way == "inside" else inner, kernel="sdpa") is handle
    assert torch.equal(output(model, inner), exact)
    assert handle.report().lost == ()
    names = list(handle.layers)
    with patched(outer if way == "inside" else inner, kernel="sage", min_seq=0):
        assert not torch.equal(output(model, inner), exact)
    assert way == "outside" or list(handle.layers) == names
    assert torch.equal(output(model, inner), exact)
    unpatch(outer if way == "inside" else inner)
    assert (generated(inner), handle_of(inner), handle_of(outer)) == ([], None, None)
    assert handle.components == {}


def test_report_131_a_model_that_leaves_its_wrapper_takes_the_patch_along():
    peft = pytest.importorskip("peft")
    model = tiny_transformers.tiny("llama")
    exact = model.run()
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=True)
    wrapped = peft.get_peft_model(model.module, lora).eval()
    handle = sage(wrapped)
    merged = wrapped.merge_and_unload()
    ours = model.run()
    assert not torch.equal(ours, exact)
    assert report(merged).kernel_calls() == handle.report().kernel_calls() == 2
    del wrapped
    gc.collect()
    assert report(merged).kernel_calls() == 2
    assert patch(merged, kernel="sage", min_seq=0) is handle
    assert list(handle.layers) == [f"model.model.layers.{i}.self_attn" for i in (0, 1)]
    assert torch.equal(model.run(), ours)
    assert report(merged).kernel_calls() == 2, "since the second patch"
    del handle
    unpatch(merged)
    assert torch.equal(model.run(), exact)
    assert generated(merged) == []


def test_report_131_a_part_of_a_patched_model_is_told_what_to_call():
    model = tiny("cogx")
    handle = sage(model.module)
    block = model.module.transformer_blocks[0]
    for call in (report, unpatch, refresh):
        with pytest.raises(PatchError, match=r"a part of .*'transformer'.*handle"):
            call(block)
    assert len(generated(model.module)) == 2
    both = nn.ModuleDict({"model": model.module, "other": ToyAttention(Direct())})
    with pytest.raises(PatchError, match=r"blocks\.0\.attn1 is patched already.*unpatch"):
        patch(both)
    unpatch(both)
    assert handle.components == {}


class Sharded:
    """What `fully_shard` puts on top of classes: methods of its own."""

    def reshard(self):
        return "resharded"

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@functools.cache
def on_top_of(kind: type) -> type:
    return type(f"Sharded{kind.__name__}", (Sharded, kind), {})


def sharded(module: nn.Module) -> None:
    module.__class__ = on_top_of(type(module))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.ones(2))
    parametrize.register_parametrization(module, "weight", Doubled())


@pytest.mark.parametrize("order", ["patch", "class"])
@pytest.mark.parametrize("put", [sharded, parametrized])
def test_report_132_a_class_that_somebody_puts_on_top_is_kept(put, order):
    model, plain = tiny_transformers.tiny("llama"), tiny_transformers.tiny("llama")
    layers = [layer.self_attn for layer in model.module.model.layers]
    handle = sage(model.module) if order == "patch" else None
    for layer in (*layers, *(layer.self_attn for layer in plain.module.model.layers)):
        put(layer)
    handle = handle or sage(model.module)
    exact = plain.run()
    assert 0 < (model.run() - exact).abs().max() < 0.1 * exact.abs().max()
    assert refresh(model.module).report().kernel_calls() == 2
    copied = copy.deepcopy(layers[0])
    handle.unpatch()
    assert torch.equal(model.run(), exact)
    names = [cls.__name__ for cls in type(plain.module.model.layers[0].self_attn).__mro__]
    for layer in layers:
        assert [cls.__name__ for cls in type(layer).__mro__] == names
        assert twin.generated_class(layer) is None
    if put is sharded:
        assert type(layers[0]) is type(layers[1])
        assert layers[0].reshard() == "resharded"
    assert twin.layer_of(copied) is None
    if put is parametrized:
        parametrize.remove_parametrizations(layers[0], "weight")
        assert type(layers[0]).__name__ == "LlamaAttention"


# -- what changes in the model -----------------------------------------------------------------


def test_a_report_is_of_the_modules_as_they_are_now():
    model, other = tiny("wan"), tiny("wan")
    handle = sage(model.module)
    blocks = model.module.blocks
    former, blocks[0] = blocks[0], other.module.blocks[0]
    names = tuple(f"transformer.blocks.0.{name}" for name in ("attn1", "attn2"))
    assert handle.report().lost == names
    assert set(handle.report().skipped) == set(names)
    text = handle.report().text()
    assert all(re.search(rf"not patched: {name} .*call refresh", text) for name in names)
    refresh(model.module)
    assert (handle.report().lost, handle.report().skipped) == ((), {})
    assert generated(former) == []
    model.run()
    assert [row.total_calls() for row in handle.report().rows] == [1] * 4
    unpatch(model.module)
    assert generated(model.module) == []


# -- threads -----------------------------------------------------------------------------------


def test_report_133_a_forward_that_began_before_unpatch_patches_nothing_after_it(monkeypatch):
    layer = ToyAttention(Direct())
    exact = layer(*qkv())
    handle = sage(layer)
    standing = host.standing

    def late(context):
        """Another thread undoes the patch after this one looked at the first layer."""
        monkeypatch.setattr(host, "standing", standing)
        thread = threading.Thread(target=unpatch, args=(layer,))
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        return standing(context)

    monkeypatch.setattr(host, "standing", late)
    assert torch.equal(layer(*qkv()), exact)
    assert generated(layer) == []
    assert handle.report().total_calls() == 0
    sage(layer)
    assert not torch.equal(layer(*qkv()), exact)


def test_report_133_patching_waits_for_a_forward_that_patches_again(monkeypatch):
    layer = ToyAttention(Direct())
    sage(layer)
    layer.processor = Direct()
    swap, waiting = host.swap, []

    def slow(context):
        thread = threading.Thread(target=unpatch, args=(layer,))
        thread.start()
        thread.join(0.2)
        waiting.append((thread, thread.is_alive()))
        return swap(context)

    monkeypatch.setattr(host, "swap", slow)
    layer(*qkv())
    ((thread, waited),) = waiting
    thread.join(10)
    assert waited
    assert generated(layer) == []


def test_report_133_two_threads_that_unpatch_undo_it_once():
    layer = ToyAttention(Direct())
    handle = sage(layer)
    layer(*qkv())
    parts = list(handle._parts)
    for _ in range(2):  # both found the patch before either undid it
        handle._release(parts)
    assert handle.report().total_calls() == 1
    assert generated(layer) == []


# -- memory ------------------------------------------------------------------------------------


def toy():
    return Pipeline(transformer=ToyAttention(ModuleProcessor()))


def cogx():
    return Pipeline(transformer=tiny("cogx").module)


def llama():
    return tiny_transformers.tiny("llama").module


@pytest.mark.parametrize("kept", [False, True], ids=["handle dropped", "handle kept"])
@pytest.mark.parametrize("make", [toy, cogx, llama])
def test_a_patched_model_is_freed_as_a_plain_one_is(make, kept):
    def weights(obj):
        module = obj if isinstance(obj, nn.Module) else obj.transformer
        return [weakref.ref(p) for p in module.parameters()]

    gc.collect()
    gc.disable()
    try:
        plain, obj = make(), make()
        found = [weights(plain), weights(obj)]
        named = None if isinstance(obj, nn.Module) else "transformer"
        handle = patch(obj, kernel="sage", min_seq=0, components=named)
        names = list(handle.layers)
        handle = handle if kept else None
        del plain, obj
        assert [[ref for ref in refs if ref() is not None] for refs in found] == [[], []]
    finally:
        gc.enable()
    if handle is not None:
        assert [row.layer for row in handle.report().rows] == names
        assert (handle.components, handle.report().lost) == ({}, ())
        handle.unpatch()
