"""Our attention by its name in the registries of diffusers and transformers."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import diffusers
import transformers
from diffusers.models import attention_dispatch as dispatcher
from torch._dynamo.testing import CompileCounter

from sage_plugin.errors import PatchError, UnknownKernelError, UnsupportedInputError, UsageError
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.plugin import obstacle, route
from sage_plugin.plugin.counts import LayerCounts
from sage_plugin.plugin.hosts import registration as names
from sage_plugin.plugin.hosts.registration import register
from sage_plugin.plugin.patch import patch, unpatch
from tests.plugin.tiny import CALLS
from tests.plugin.tiny import tiny as picture
from tests.plugin.tiny_transformers import DECODER, FAMILIES, TOKENS, tiny, words
from tests.plugin.toys import difference

ROOT = Path(__file__).resolve().parents[2]
NAME = "sage_plugin"
Registry = dispatcher._AttentionBackendRegistry


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    active = Registry._active_backend
    named = register()
    for layer in named.layers.values():
        layer.counts = LayerCounts()
    torch._dynamo.reset()
    yield
    monkeypatch.undo()
    register()
    Registry.set_active_backend(active)
    torch._dynamo.reset()


def counted(library):
    (row,) = [r for r in names._NAMED.report().rows if r.layer == f"{NAME}.{library}"]
    return row.calls, row.fallbacks


def named_model(family, **options):
    """A model under the name, and the number of its calls."""
    model = tiny(family)
    register(**{"kernel": "fav2", "min_seq": 1, **options})
    model.module.set_attn_implementation(NAME)
    return model


# -- transformers ----------------------------------------------------------------------------------

TAKEN = ("llama", "mistral", "gpt2", "bert", "bart", "vit")


def without_attention(side):
    kept = torch.arange(TOKENS) >= 7 if side == "left" else torch.arange(TOKENS) < TOKENS - 7
    return torch.stack((torch.ones(TOKENS, dtype=torch.bool), kept)).long()


@pytest.mark.parametrize("family", TAKEN)
def test_calls_by_the_name_run_on_a_kernel(family):
    expected = tiny(family).run()
    model = named_model(family)
    assert difference(model.run(), expected) < 1e-5
    assert counted("transformers") == ({"fav2:emulation": FAMILIES[family].calls}, {})


@pytest.mark.parametrize("family", ["llama", "mistral", "bert"])
def test_the_host_s_kernel_is_sdpa_to_the_bit(family):
    expected = tiny(family).run()
    model = named_model(family, kernel="sdpa")
    assert torch.equal(model.run(), expected)
    assert counted("transformers") == ({"sdpa:host": FAMILIES[family].calls}, {})


@pytest.mark.parametrize(("family", "word"), [("deepseek-v3", "channels"), ("t5", "position_bias")])
def test_what_no_kernel_takes_is_sdpa_s_to_the_bit(family, word):
    expected = tiny(family).run()
    model = named_model(family)
    assert torch.equal(model.run(), expected)
    calls, fallbacks = counted("transformers")
    assert calls == {}
    assert sum(fallbacks.values()) == FAMILIES[family].calls
    assert all(word in str(reason) for reason in fallbacks)


@pytest.mark.parametrize("family", ["llama", "mistral", "bert"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_lost(family, side):
    padding = without_attention(side)
    seen = padding.bool()
    expected = tiny(family).run(attention_mask=padding)
    model = named_model(family)
    found = model.run(attention_mask=padding)
    assert counted("transformers")[0] == {"fav2:emulation": FAMILIES[family].calls}
    assert difference(found[seen], expected[seen]) < 1e-5
    ids = model.inputs["input_ids"][1:, seen[1]]
    alone = model.run(input_ids=ids, attention_mask=torch.ones_like(ids))
    if side == "right" or family == "llama":  # rotary positions are relative
        assert difference(found[1:, seen[1]], alone) < 1e-5


@pytest.mark.parametrize("dense", [torch.bool, torch.float32])
def test_a_dense_mask_of_the_caller_s_arrives(dense):
    visible = torch.rand(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) > 0.4
    visible |= torch.eye(TOKENS, dtype=torch.bool)
    mask = visible if dense is torch.bool else torch.where(visible, 0.0, float("-inf"))
    expected = tiny("llama").run(attention_mask=mask)
    model = named_model("llama")
    assert difference(model.run(attention_mask=mask), expected) < 1e-5
    assert counted("transformers") == ({"fav2:emulation": 2}, {})
    assert difference(model.run(), expected) > 1e-3


@pytest.mark.parametrize(
    ("family", "cache"), [("llama", None), ("llama", "static"), ("mistral", None), ("bart", None)]
)
def test_generation_with_a_cache_gives_the_same_tokens(family, cache):
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    options |= {"cache_implementation": cache, "disable_compile": True}
    if family != "bart":
        options["attention_mask"] = without_attention("left")
    ids = words()
    expected = tiny(family).module.generate(ids, **options)
    model = named_model(family)
    assert torch.equal(model.module.generate(ids, **options), expected)
    calls, fallbacks = counted("transformers")
    if family == "bart":  # of its encoder, `generate` asks for what no kernel need know
        assert calls["fav2:emulation"] >= 24
        assert sum(fallbacks.values()) <= 2
    else:
        assert (calls, fallbacks) == ({"fav2:emulation": 12}, {})


def test_further_tokens_are_the_host_s_by_default():
    model = named_model("llama", min_seq=8)
    model.module.generate(words(), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert counted("transformers") == (
        {"fav2:emulation": 2},
        {FallbackReason(Fallback.SHORTER_THAN_MIN_SEQ, 8): 8},
    )


def test_models_are_built_and_loaded_under_the_name(tmp_path):
    register(kernel="fav2", min_seq=1)
    config = transformers.LlamaConfig(**DECODER)
    built = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    built.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text(encoding="utf-8")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(words()).logits, built(words()).logits)
    assert counted("transformers") == ({"fav2:emulation": 4}, {})


@pytest.mark.parametrize(("family", "argument"), [("gemma2", "softcap"), ("gpt-oss", "s_aux")])
@pytest.mark.parametrize("is_patched", [False, True])
def test_meaning_that_sdpa_leaves_out_is_refused(family, argument, is_patched):
    model = named_model(family)
    if is_patched:
        patch(model.module, kernel="fav2", min_seq=1)
    with pytest.raises(UnsupportedInputError, match=f"{argument}.*sage_plugin.patch"):
        model.run()


def test_gradients_flow_through_sdpa():
    model = named_model("llama")
    model.module(**model.inputs).logits.sum().backward()
    assert counted("transformers") == ({}, {FallbackReason(Fallback.GRADIENT): 2})
    assert all(p.grad is not None for p in model.module.parameters())


def test_a_language_model_compiles_as_one_graph_that_follows_the_options():
    model = named_model("llama", kernel="sage")
    padding = {"attention_mask": without_attention("left")}
    seen = padding["attention_mask"].bool()
    eager, calls = model.run(**padding), counted("transformers")
    counter = CompileCounter()
    compiled = torch.compile(model.module, backend=counter, fullgraph=True)
    with torch.no_grad():
        found = compiled(**model.inputs, **padding).logits
        register(kernel="sdpa")
        host = compiled(**model.inputs, **padding).logits
    assert counter.frame_count == 2
    assert torch.allclose(found[seen], eager[seen], atol=1e-6)
    assert torch.allclose(host[seen], tiny("llama").run(**padding)[seen], atol=1e-6)
    assert not torch.allclose(host[seen], found[seen], atol=1e-6)
    assert counted("transformers") == calls


@pytest.mark.parametrize("name_first", [True, False])
def test_a_patched_language_model_under_the_name_is_taken_once(name_first):
    expected = tiny("llama").run(attention_mask=without_attention("left"))
    model = named_model("llama") if name_first else tiny("llama")
    handle = patch(model.module, kernel="sage", min_seq=1)
    model.module.set_attn_implementation(NAME)
    found = model.run(attention_mask=without_attention("left"))
    assert handle.report().kernel_calls() == handle.report().total_calls() == 2
    assert all(row.calls == {"sage:emulation": 1} for row in handle.report().rows)
    assert counted("transformers") == ({}, {})
    assert 1e-5 < difference(found[0], expected[0]) < 0.02
    patch(model.module, kernel="sage", min_seq=TOKENS + 1)
    assert torch.equal(model.run(attention_mask=without_attention("left")), expected)
    assert counted("transformers") == ({}, {})
    unpatch(model.module)
    register(kernel="fav2", min_seq=1)
    model.run()
    assert counted("transformers") == ({"fav2:emulation": 2}, {})


# -- diffusers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["wan", "flux"])
def test_the_backend_takes_all_calls_and_the_reset_restores_the_bits(family):
    model = picture(family)
    before = model.run()
    register(kernel="sage", min_seq=1)
    model.module.set_attention_backend(NAME)
    after = model.run()
    assert counted("diffusers") == ({"sage:emulation": CALLS[family]}, {})
    assert 0 < difference(after, before) < 0.05
    model.module.reset_attention_backend()
    Registry.set_active_backend(dispatcher.AttentionBackendName.NATIVE)
    assert torch.equal(model.run(), before)
    assert counted("diffusers")[0] == {"sage:emulation": CALLS[family]}


@pytest.mark.parametrize("options", [{"kernel": "sdpa"}, {"kernel": "sage"}, {}])
def test_what_no_kernel_takes_is_the_native_backend_s_to_the_bit(options):
    model = picture("wan")
    before = model.run()
    register(**options)
    with dispatcher.attention_backend(NAME):
        assert torch.equal(model.run(), before)
    calls, fallbacks = counted("diffusers")
    assert sum(calls.values()) + sum(fallbacks.values()) == CALLS["wan"]
    assert torch.equal(model.run(), before)
    assert counted("diffusers") == (calls, fallbacks)


@pytest.mark.parametrize("family", ["cogx", "sd3", "unet"])
def test_a_family_that_does_not_dispatch_is_not_reached(family):
    model = picture(family)
    before = model.run()
    register(kernel="sage", min_seq=1, on_unsupported="error")
    model.module.set_attention_backend(NAME)
    assert torch.equal(model.run(), before)
    assert counted("diffusers") == ({}, {})


def test_masks_of_each_kind_and_every_argument_arrive(monkeypatch):
    monkeypatch.setattr(Registry, "_checks_enabled", True)
    register(kernel="fav2", min_seq=1)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 24, h, 16, generator=draw) for h in (4, 2, 2))
    padding = torch.arange(24)[None] < torch.tensor([[24], [15]])
    masks = (None, padding, padding[:, None, None], torch.randn(2, 4, 24, 24, generator=draw))
    for mask in masks:
        options = {"attn_mask": mask, "scale": 0.3, "enable_gqa": True, "is_causal": mask is None}
        expected = dispatcher.dispatch_attention_fn(q, k, v, **options)
        with dispatcher.attention_backend(NAME):
            found = dispatcher.dispatch_attention_fn(q, k, v, **options)
        assert difference(found, expected) < 1e-5
    assert counted("diffusers") == ({"fav2:emulation": len(masks)}, {})
    with dispatcher.attention_backend(NAME):
        found = dispatcher.dispatch_attention_fn(q, q, q, attention_kwargs={"return_lse": True})
    scores = torch.einsum("bqhd,bkhd->bhqk", q, q) / 4
    torch.testing.assert_close(found[1], scores.logsumexp(-1), rtol=0, atol=1e-5)


def test_a_sequence_spread_over_devices_is_the_native_backend_s(monkeypatch):
    passed = {}
    native = dispatcher.AttentionBackendName.NATIVE
    monkeypatch.setitem(Registry._backends, native, lambda **given: passed.update(given) or "out")
    register(kernel="fav2", min_seq=1)
    q, config = torch.randn(1, 16, 2, 32), object()
    with dispatcher.attention_backend(NAME):
        assert dispatcher.dispatch_attention_fn(q, q, q, parallel_config=config) == "out"
    assert passed["_parallel_config"] is config
    assert passed["query"] is q
    assert counted("diffusers") == ({}, {route.PARALLEL: 1})
    assert Registry._is_context_parallel_available(dispatcher.AttentionBackendName(NAME))


def test_a_denoiser_compiles_as_one_graph_that_follows_the_options():
    model = picture("wan")
    before = model.run()
    register(kernel="sage", min_seq=1)
    model.module.set_attention_backend(NAME)
    eager, calls = model.run(), counted("diffusers")
    counter = CompileCounter()
    compiled = torch.compile(model.module, backend=counter, fullgraph=True)
    assert torch.allclose(model.run(compiled), eager, atol=1e-6)
    register(kernel="sdpa")
    assert torch.allclose(model.run(compiled), before, atol=1e-6)
    assert counter.frame_count == 2
    assert not torch.allclose(eager, before, atol=1e-6)
    assert counted("diffusers") == calls


def test_a_patched_denoiser_with_the_backend_is_taken_once():
    model = picture("wan")
    before = model.run()
    register(kernel="fav2", min_seq=1)
    handle = patch(model.module, kernel="sage", min_seq=1)
    model.module.set_attention_backend(NAME)
    model.run()
    assert handle.report().kernel_calls() == handle.report().total_calls() == CALLS["wan"]
    patch(model.module, kernel="sage", min_seq=1000)
    assert torch.equal(model.run(), before)
    assert handle.report().total_calls() == CALLS["wan"]  # counted anew
    assert handle.report().kernel_calls() == 0
    assert counted("diffusers") == ({}, {})
    unpatch(model.module)
    model.run()
    assert counted("diffusers") == ({"fav2:emulation": CALLS["wan"]}, {})


# Runs in a fresh interpreter: diffusers reads the variable when its first model is imported.
BY_ENVIRONMENT = """
import sys
from sage_plugin.plugin.hosts.registration import register
assert not {"diffusers", "transformers"} & sys.modules.keys()
sys.modules["transformers"] = None  # as if it were not installed
named = register(kernel="sage", min_seq=1)
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
dispatch_attention_fn(*(torch.randn(1, 16, 2, 32) for _ in range(3)))
print([(row.layer, row.calls) for row in named.report().rows])
"""


def test_the_variable_of_diffusers_names_the_backend_and_the_import_loads_no_library():
    done = subprocess.run(
        [sys.executable, "-c", BY_ENVIRONMENT],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={"DIFFUSERS_ATTN_BACKEND": NAME, "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[('sage_plugin.diffusers', {'sage:emulation': 1})]"


# -- the function itself ---------------------------------------------------------------------------


def test_a_second_call_changes_the_options_of_the_one_handle():
    named = register(kernel="sage", min_seq=1)
    model = picture("wan")
    model.module.set_attention_backend(NAME)
    model.run()
    assert register(kernel="fav2", min_seq=16) is named
    model.run()
    assert counted("diffusers") == (
        {"sage:emulation": 4, "fav2:emulation": 2},
        {FallbackReason(Fallback.SHORTER_THAN_MIN_SEQ, 16): 2},
    )
    members = [m for m in dispatcher.AttentionBackendName if m.value == NAME]
    assert len(members) == 1
    assert repr(named) == "<NamedAttention 'sage_plugin' in diffusers, transformers>"
    assert "6 of 8 calls ran on a kernel" in named.report().text()


def test_options_are_checked_as_those_of_patch_and_a_refused_call_changes_nothing():
    named = register(kernel="sage", min_seq=1)
    options = named.state.options
    with pytest.raises(UnknownKernelError, match="nonesuch"):
        register(kernel="nonesuch")
    with pytest.raises(UsageError, match="min_seq is -1"):
        register(min_seq=-1)
    with pytest.raises(UsageError, match="on_unsupported is 'loud'"):
        register(on_unsupported="loud")
    assert named.state.options is options


def test_unsupported_calls_are_errors_on_request():
    model = named_model("t5", on_unsupported="error")
    with pytest.raises(UnsupportedInputError, match=r"sage_plugin\.transformers.*position_bias"):
        model.run()


def test_the_environment_switches_it_off(monkeypatch):
    expected = tiny("llama").run()
    model = named_model("llama")
    monkeypatch.setenv("SAGE_PLUGIN_DISABLE", "1")
    assert torch.equal(model.run(), expected)
    assert counted("transformers") == ({}, {obstacle.DISABLED: 2})


@pytest.mark.parametrize("absent", [("diffusers",), ("transformers",)])
def test_a_library_that_is_not_there_is_passed_over(absent, monkeypatch):
    monkeypatch.setattr(names, "find_spec", lambda name: None if name in absent else object())
    entered = []
    for library in tuple(names._ENTRANCES):
        monkeypatch.setitem(names._ENTRANCES, library, lambda _, name=library: entered.append(name))
    register()
    assert set(entered) == {"diffusers", "transformers"} - set(absent)


def test_without_any_library_there_is_nothing_to_register_with(monkeypatch):
    monkeypatch.setattr(names, "find_spec", lambda name: None)
    with pytest.raises(PatchError, match="neither diffusers nor transformers is installed"):
        register()


def test_the_member_survives_copies_and_pickles():
    member = dispatcher.AttentionBackendName(NAME)
    assert copy.deepcopy(member) is member is pickle.loads(pickle.dumps(member))
    model = picture("flux")
    model.module.set_attention_backend(NAME)
    copied = copy.deepcopy(model.module)
    assert next(iter(copied.attn_processors.values()))._attention_backend is member
    assert isinstance(copied, diffusers.FluxTransformer2DModel)
