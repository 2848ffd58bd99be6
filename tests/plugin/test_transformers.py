"""Models of transformers: what their attention calls become, and that nothing else changes."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sage_plugin.errors import PatchError, UnsupportedInputError
from sage_plugin.plugin.hosts import transformers_dispatch as interface
from sage_plugin.plugin.patch import patch, patched, unpatch
from tests.plugin.tiny import Pipeline
from tests.plugin.tiny_transformers import FAMILIES, TOKENS, tiny, words
from tests.plugin.toys import difference

ALL_TAKEN = [name for name, family in FAMILIES.items() if not family.reason]
MASKED = ("llama", "gemma2", "gpt-oss", "bert")


def attention_classes(module):
    return [type(m) for m in module.modules() if "Attention" in type(m).__name__]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forward_makes_the_expected_calls_and_unpatch_restores_everything(name):
    model, family = tiny(name), FAMILIES[name]
    before, keys = model.run(), list(model.module.state_dict())
    classes, config = attention_classes(model.module), copy.deepcopy(model.module.config)

    handle = patch(model.module, kernel="sdpa", min_seq=0)
    assert torch.equal(model.run(), before)
    assert handle.report().total_calls() == family.calls
    assert all(row.calls == {"sdpa:host": 1} for row in handle.report().rows)
    assert model.module.config == config
    assert list(model.module.state_dict()) == keys

    unpatch(model.module)
    assert attention_classes(model.module) == classes
    assert torch.equal(model.run(), before)
    assert handle.report().total_calls() == family.calls


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("kernel", "limit"), [("fav2", 1e-5), ("sage", 0.02)])
def test_kernels_take_the_calls_or_name_what_keeps_them(name, kernel, limit):
    model, family = tiny(name), FAMILIES[name]
    before = model.run()
    handle = patch(model.module, kernel=kernel, min_seq=0)
    after, report = model.run(), handle.report()
    reasons = {reason for row in report.rows for reason in row.fallbacks}
    if family.reason:
        assert report.kernel_calls() == 0
        assert all(family.reason in str(reason) for reason in reasons)
        assert torch.equal(after, before)
    else:
        assert report.kernel_calls() == family.calls
        assert reasons == set()
        assert difference(after, before) < limit
        assert not torch.equal(after, before)


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("side", ["left", "right"])
def test_report_40_and_43_padding_is_hidden(name, side):
    model = tiny(name)
    kept = torch.arange(TOKENS) >= 7 if side == "left" else torch.arange(TOKENS) < TOKENS - 7
    padding = torch.stack((torch.ones(TOKENS), kept)).long()
    before = model.run(attention_mask=padding)
    handle = patch(model.module, kernel="fav2", min_seq=0)
    after = model.run(attention_mask=padding)
    assert handle.report().kernel_calls() == FAMILIES[name].calls
    assert difference(after[padding.bool()], before[padding.bool()]) < 1e-5
    other = model.inputs["input_ids"].clone()
    other[1, ~kept] = (other[1, ~kept] + 5) % 60 + 1
    same = model.run(input_ids=other, attention_mask=padding)
    assert torch.equal(same[padding.bool()], after[padding.bool()])


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "mistral", "bart", "whisper"])
@pytest.mark.parametrize("min_seq", [0, 8])
def test_generation_with_a_cache_gives_the_same_tokens(name, min_seq):
    model = tiny(name)
    inputs = {k: v for k, v in model.inputs.items() if k != "decoder_input_ids"}
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    before = model.module.generate(**inputs, **options)
    handle = patch(model.module, kernel="fav2", min_seq=min_seq)
    assert torch.equal(model.module.generate(**inputs, **options), before)
    decoder = [r for r in handle.report().rows if "encoder" not in r.layer or "decoder" in r.layer]
    for row in decoder:
        if "encoder_attn" not in row.layer:
            steps = 10 if min_seq == 0 else int(name not in ("bart", "whisper"))
            assert row.kernel_calls() == steps
            assert row.total_calls() == 10


def test_a_static_cache_is_filled_and_read():
    model = tiny("llama")
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    before = model.module.generate(**model.inputs, **options)
    handle = patch(model.module, kernel="fav2", min_seq=0)
    assert torch.equal(model.module.generate(**model.inputs, **options), before)
    assert handle.report().kernel_calls() == 12


def test_report_79_compiled_models_run_on_kernels_in_one_graph():
    model = tiny("llama")
    handle = patch(model.module, kernel="sage", min_seq=0)
    eager = model.run()
    torch._dynamo.reset()
    compiled = torch.compile(model.module, fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(compiled(**model.inputs).logits, eager, atol=1e-5)
    handle.unpatch()
    with torch.no_grad():
        plain = compiled(**model.inputs).logits
    assert torch.allclose(plain, model.run(), atol=1e-5)
    assert not torch.allclose(plain, eager, atol=1e-7)


def test_copies_and_pickles_are_not_patched():
    model = tiny("llama")
    before, classes = model.run(), attention_classes(model.module)
    patch(model.module, kernel="sage", min_seq=0)
    after = model.run()
    for copied in (copy.deepcopy(model.module), pickle.loads(pickle.dumps(model.module))):
        assert attention_classes(copied) == classes
        with torch.no_grad():
            assert torch.equal(copied(**model.inputs).logits, before)
    assert torch.equal(model.run(), after)
    assert not torch.equal(after, before)


def test_models_that_share_a_configuration_are_patched_one_by_one():
    config = tiny("llama").module.config
    one, two = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    handle = patch(one, kernel="sage", min_seq=0)
    with torch.no_grad():
        two(words())
    assert handle.report().total_calls() == 0
    assert config._attn_implementation == "sdpa"


def test_layers_are_chosen_by_their_paths():
    model = tiny("llama")
    handle = patch(model.module, kernel="sage", min_seq=0, exclude="*.layers.0.*")
    assert list(handle.layers) == ["model.model.layers.1.self_attn"]
    model.run()
    assert handle.report().kernel_calls() == 1
    patch(model.module, kernel="sage", min_seq=0)
    assert len(handle.layers) == 2


def test_report_48_a_wrapper_is_looked_through_and_a_text_encoder_only_on_demand():
    model = tiny("llama")
    wrapper = nn.ModuleDict({"base": model.module})
    assert next(iter(patch(wrapper).layers)) == "model.base.model.layers.0.self_attn"
    unpatch(wrapper)
    pipe = Pipeline(text_encoder=model.module)
    with pytest.raises(PatchError, match="no denoiser"):
        patch(pipe)
    assert len(patch(pipe, components="text_encoder").layers) == 2


def test_a_module_that_was_given_another_class_is_patched_again(caplog):
    model = tiny("llama")
    attention = model.module.model.layers[0].self_attn
    handle = patch(model.module, kernel="sage", min_seq=0)
    after = model.run()
    other = type("Other", (transformers.models.llama.modeling_llama.LlamaAttention,), {})
    attention.__class__ = other
    assert handle.report().lost == ("model.model.layers.0.self_attn",)
    assert torch.equal(model.run(), after)
    assert handle.report().lost == ()
    assert handle.report().kernel_calls() == 4
    assert "1 are patched again" in caplog.text
    attention.__class__ = other
    assert patch(model.module, kernel="sage", min_seq=0).report().lost == ()
    handle.unpatch()
    assert type(attention) is other


class Foreign(nn.Module):
    """Attention as a checkpoint with code of its own may bring it."""

    def forward(self, x):
        heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads)


def test_attention_of_somebody_else_s_inside_a_model_is_found():
    model = tiny("llama")
    model.module.extra = Foreign()
    handle = patch(model.module, kernel="sage", min_seq=0, include="extra")
    assert list(handle.layers) == ["model.extra"]
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(0))
    found = model.module.extra(x)
    handle.unpatch()
    expected = model.module.extra(x)
    assert handle.report().kernel_calls() == 1
    assert 0 < difference(found, expected) < 0.02


def by_configuration(model):
    model.config.output_attentions = True
    return {}


def by_argument(model):
    return {"output_attentions": True}


@pytest.mark.parametrize("ask", [by_argument, by_configuration])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "opt", "siglip"])
def test_report_129_attention_weights_come_from_the_model_s_own_attention(name, ask):
    model = tiny(name)
    model.module.set_attn_implementation("eager")
    asked = ask(model.module)
    with torch.no_grad():
        exact = model.module(**model.inputs, **asked).attentions
        handle = patch(model.module, kernel="sage", min_seq=0)
        made = model.module(**model.inputs, **asked).attentions
    assert len(exact) == len(made) == len(handle.layers) > 0
    assert all(map(torch.equal, made, exact))
    assert [row.fallbacks for row in handle.report().rows] == [{interface.WEIGHTS: 1}] * len(made)
    if ask is by_argument:
        model.run()
        assert handle.report().kernel_calls() == len(made)


def test_report_129_a_graph_gives_the_weights_that_are_asked_for():
    model = tiny("llama")
    model.module.set_attn_implementation("eager")
    model.module.config.output_attentions = True
    patch(model.module, kernel="sage", min_seq=0)
    torch._dynamo.reset()
    with torch.no_grad():
        eager = model.module(**model.inputs).attentions
        made = torch.compile(model.module, backend="eager")(**model.inputs).attentions
    assert len(made) == len(eager) == 2
    assert all(map(torch.allclose, made, eager))
    torch._dynamo.reset()


def test_report_136_arguments_that_sdpa_passes_over_cost_no_kernel():
    model = tiny("modernbert")
    handle = patch(model.module, kernel="sage", min_seq=0)
    model.run()
    assert handle.report().kernel_calls() == len(handle.layers) > 0
    unpatch(model.module)
    patch(model.module, kernel="sage", min_seq=0)
    torch._dynamo.reset()
    with torch.no_grad():
        eager = model.module(**model.inputs)[0]
        compiled = torch.compile(model.module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(**model.inputs)[0], eager, rtol=0, atol=1e-5)
    torch._dynamo.reset()


def test_what_a_kernel_cannot_take_is_an_error_on_request():
    model = tiny("t5")
    patch(model.module, kernel="sage", min_seq=0, on_unsupported="error")
    with pytest.raises(UnsupportedInputError, match="position_bias"):
        model.run()


def test_gradients_go_through_the_model_s_own_attention():
    model = tiny("llama")
    handle = patch(model.module, kernel="sage", min_seq=0)
    model.module(**model.inputs).logits.sum().backward()
    assert handle.report().kernel_calls() == 0
    assert all(p.grad is not None for p in model.module.parameters())


# -- the table itself ------------------------------------------------------------------------------


def plain(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    weights = nn.functional.softmax(torch.matmul(query, key.transpose(2, 3)) * scaling, dim=-1)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def biased(module, query, key, value, attention_mask, scaling, position_bias=None, **kwargs):
    return plain(module, query, key, value, position_bias, scaling)


def picky(module, query, key, value, attention_mask, scaling, **kwargs):
    return plain(module, query, key, value, kwargs.get("block_indices"), scaling)


def passing(*args, **kwargs):
    return plain(*args, **kwargs)


def odd(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    out, weights = plain(module, query, key, value, attention_mask, scaling)
    return out + query.mean(), weights


@pytest.mark.parametrize(
    ("function", "implementation", "others", "words"),
    [
        (plain, "sdpa", {}, None),
        (plain, "eager", {"sliding_window": 3, "position_ids": 1, "use_cache": True}, None),
        (plain, "eager", {"softcap": 30.0, "deterministic": None}, None),
        (plain, "sdpa", {"softcap": 30.0}, "no soft cap.*eager"),
        (plain, "sdpa", {"s_aux": torch.ones(4)}, "no sinks.*eager"),
        (odd, "eager", {}, "more than softmax"),
        (odd, "sdpa", {}, None),
        (plain, "flash_attention_2", {}, "flash_attention_2"),
        (plain, "flex_attention", {}, "flex_attention"),
        (sdpa_attention_forward, "sdpa", {"deterministic": True, "block_indices": 0}, None),
        (sdpa_attention_forward, "sdpa", {"position_bias": 1.0}, "position_bias"),
        (plain, "eager", {"position_bias": 1.0}, None),
        (biased, "sdpa", {"position_bias": 1.0}, "position_bias"),
        (picky, "sdpa", {"block_indices": 0}, "block_indices"),
        (passing, "sdpa", {"deterministic": True}, "deterministic"),
    ],
)
def test_calls_that_mean_more_than_kernels_know_are_left(function, implementation, others, words):
    reason = interface._obstacle(function, implementation, others)
    assert (reason is None) == (words is None)
    assert words is None or re.search(words, str(reason))


def test_the_table_is_otherwise_the_original_one():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as table

    ours = interface.Interfaces(lambda: table)
    assert "sdpa" in ours
    assert "nothing" not in ours
    assert ours.get("nothing") is None
    assert ours.get("nothing", plain).args == (plain, "nothing")
    assert ours["sdpa"].args == (table["sdpa"], "sdpa")
    assert ours.get_interface("eager", plain).args == (plain, "eager")
    assert list(ours.valid_keys()) == list(table.valid_keys())


def test_patched_is_undone_after_an_error():
    model = tiny("bert")
    classes = attention_classes(model.module)

    def fails():
        with patched(model.module, kernel="sage"):
            assert attention_classes(model.module) != classes
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert attention_classes(model.module) == classes
