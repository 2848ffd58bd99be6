"""Generated classes: every way to reach attention, and nothing else changed by them."""

from __future__ import annotations

import ast
import copy
import gc
import importlib
import inspect
import pickle
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaAttention

from sage_plugin.plugin import retarget, twin
from sage_plugin.plugin.patch import patch, unpatch
from tests.plugin import toys
from tests.plugin.toys import ToyAttention, qkv

KNOWN_EXCEPTIONS = {
    # Products of matrices, linear attention, xformers and NATTEN: no call of SDPA or dispatch.
    "AttnProcessor", "AttnAddedKVProcessor", "CrossFrameAttnProcessor",
    "CustomDiffusionAttnProcessor", "CustomDiffusionXFormersAttnProcessor",
    "IPAdapterAttnProcessor", "IPAdapterXFormersAttnProcessor",
    "LTX2VideoVaeNeighborhoodNattenProcessor", "PAGCFGSanaLinearAttnProcessor2_0",
    "PAGIdentitySanaLinearAttnProcessor2_0", "SanaLinearAttnProcessor2_0",
    "SanaLinearAttnProcessor3_0", "SanaMultiscaleAttnProcessor2_0", "SlicedAttnAddedKVProcessor",
    "SlicedAttnProcessor", "XFormersAttnAddedKVProcessor", "XFormersAttnProcessor",
    "XFormersJointAttnProcessor",
}  # fmt: skip


@pytest.mark.parametrize("way", toys.WAYS, ids=lambda way: way.__name__)
def test_every_way_to_attention_is_redirected(way):
    layer = ToyAttention(way())
    q, k, v = qkv()
    with torch.no_grad():
        before = layer(q, k, v)
        handle = patch(layer, kernel="sage", min_seq=0)
        during = layer(q, k, v)
        unpatch(layer)
        after = layer(q, k, v)
    assert torch.equal(before, after)
    assert 0 < (before - during).abs().sum() / before.abs().sum() < 0.02
    assert handle.report().kernel_calls() == 1


@pytest.mark.parametrize("way", toys.WAYS, ids=lambda way: way.__name__)
def test_every_way_compiles_to_the_redirected_call(way):
    layer = ToyAttention(way())
    q, k, v = qkv()
    torch._dynamo.reset()
    with torch.no_grad():
        host = layer(q, k, v)
        patch(layer, kernel="sage", min_seq=0)
        eager = layer(q, k, v)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-6)
    assert (compiled - host).abs().max() > 1e-5


def test_the_class_is_a_subclass_that_keeps_name_and_signature():
    original = toys.Direct
    generated = retarget.patched_class(original)
    assert issubclass(generated, original)
    assert original.__name__ in generated.__name__
    assert generated is retarget.patched_class(original)
    assert inspect.signature(generated.__call__) == inspect.signature(original.__call__)
    assert "F.scaled_dot_product_attention" in inspect.getsource(original.__call__)
    assert original.__call__.__globals__ is vars(toys)
    assert vars(toys)["F"] is F


@pytest.mark.parametrize("kind", ["processor", "module", "sharded"])
def test_classes_that_are_new_each_time_do_not_stay(kind):
    """Some of the latest stay, for the next patch of the same model."""
    makers = {
        "processor": (toys.Direct, retarget.patched_class),
        "module": (LlamaAttention, retarget.patched_module_class),
        "sharded": (retarget.patched_class(toys.Direct), twin.plain_class),
    }
    base, made_of = makers[kind]
    seen = []
    for number in range(twin.KEPT_CLASSES + 40):
        original = type(f"Made{number}", (base,), {})
        made = made_of(original)
        assert made is not None
        assert made is made_of(original)
        seen.append(weakref.ref(original))
    del original, made
    gc.collect()
    alive = [one for one in seen if one() is not None]
    assert len(alive) <= twin.KEPT_CLASSES
    assert seen[-1] in alive or kind == "sharded"


def test_a_class_in_use_stays_the_same_however_many_come_after_it():
    original = type("Early", (toys.Direct,), {})
    instance = retarget.patched_class(original)()
    for number in range(twin.KEPT_CLASSES + 1):
        retarget.patched_class(type(f"Later{number}", (toys.Direct,), {}))
    gc.collect()
    assert retarget.patched_class(original) is type(instance)


def test_the_copied_methods_are_the_original_code_over_the_real_module():
    original = toys.Direct.__call__
    copied = retarget.patched_class(toys.Direct).__call__.__wrapped__
    assert copied.__globals__ is vars(toys)
    assert copied.__code__.co_code == original.__code__.co_code
    assert copied.__code__.co_names == ("_sage_plugin_F", "scaled_dot_product_attention")
    stand_in = vars(toys)["_sage_plugin_F"]
    assert stand_in.scaled_dot_product_attention is not F.scaled_dot_product_attention
    assert stand_in.silu is F.silu


def test_a_new_instance_of_the_class_belongs_to_no_layer():
    layer = ToyAttention(toys.Direct())
    patch(layer, kernel="sage", min_seq=0)
    fresh = type(layer.processor)()  # unet_motion_model does this
    q, k, v = qkv()
    assert torch.equal(fresh(layer, q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("way", [toys.Direct, toys.ModuleProcessor])
def test_copies_and_pickles_are_unpatched(way):
    layer = ToyAttention(way())
    q, k, v = qkv()
    with torch.no_grad():
        before = layer(q, k, v)
        handle = patch(layer, kernel="sage", min_seq=0)
        copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
        for other in copies:
            assert type(other.processor) is way
            assert torch.equal(other(q, k, v), before)
            assert other.state_dict().keys() == layer.state_dict().keys()
        assert handle.report().total_calls() == 0
        assert not torch.equal(layer(q, k, v), before)
    patch(copies[0], kernel="sage", min_seq=0)
    copies[0](q, k, v)
    assert handle.report().total_calls() == 1


class Counted(toys.Direct):
    """Says itself how it is copied and pickled."""

    def __init__(self):
        self.copies = 0

    def __deepcopy__(self, memo):
        made = memo[id(self)] = type(self)()
        made.copies = self.copies + 1
        return made

    def __getstate__(self):
        return {"copies": self.copies + 10}


WAYS_TO_COPY = {
    "shallow": (copy.copy, 10),
    "deep": (copy.deepcopy, 1),
    "pickle": (lambda obj: pickle.loads(pickle.dumps(obj)), 10),
}


@pytest.mark.parametrize("way", WAYS_TO_COPY)
def test_copies_are_made_as_the_original_s_are_and_shared_as_they_are(way):
    made, copies = WAYS_TO_COPY[way]
    mine = Counted()
    model = torch.nn.ModuleList([ToyAttention(mine), ToyAttention(mine)])
    patch(model, kernel="sage", min_seq=0)
    found = made(model[0].processor)
    assert (type(found), found.copies) == (Counted, copies)
    assert found is not mine
    first, second = (layer.processor for layer in copy.deepcopy(model))
    assert first is second
    assert type(first) is Counted


def test_a_module_processor_keeps_its_weights():
    layer = ToyAttention(toys.ModuleProcessor())
    names, weight = list(layer.state_dict()), layer.processor.gain
    patch(layer, kernel="sage", min_seq=0)
    assert list(layer.state_dict()) == names
    assert layer.processor.gain is weight
    with torch.no_grad():
        weight.fill_(3.0)
    unpatch(layer)
    assert list(layer.state_dict()) == names
    assert layer.processor.gain is weight


def test_what_changes_in_the_original_module_is_taken_up_by_the_next_patch(monkeypatch):
    layer = ToyAttention(toys.ByHelpers())
    patch(layer, kernel="sage", min_seq=0)
    monkeypatch.setattr(toys, "_outer", lambda depth, q, k, v, options: q * 0)
    patch(layer, kernel="sage", min_seq=0)
    assert layer(*qkv()).abs().max() == 0
    monkeypatch.undo()
    handle = patch(layer, kernel="sage", min_seq=0)
    layer(*qkv())
    assert handle.report().kernel_calls() == 1


def test_every_processor_of_diffusers_can_be_redirected():
    """Parses upstream, so that a processor that reaches attention in a new way is noticed."""
    diffusers = pytest.importorskip("diffusers")
    root = Path(diffusers.__file__).parent
    classes = {
        (f"diffusers.{'.'.join(path.relative_to(root).with_suffix('').parts)}", node.name)
        for path in root.glob("models/**/*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and any(_is_processor_call(item) for item in node.body)
    }
    assert len(classes) > 100
    missed = {
        name
        for module, name in classes
        if retarget.patched_class(getattr(importlib.import_module(module), name)) is None
    }
    assert missed <= KNOWN_EXCEPTIONS


def _is_processor_call(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.FunctionDef)
        and node.name == "__call__"
        and [a.arg for a in node.args.args[:2]] == ["self", "attn"]
    )
