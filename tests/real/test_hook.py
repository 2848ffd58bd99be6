"""The adapter between transformers and our kernels, on a small model with random weights."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from sage_plugin.errors import UnsupportedInputError
from tests.real.hook import NAME, running_on


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


IDS = torch.arange(40).view(2, 20)


def test_every_layer_runs_on_the_kernel_with_unexpanded_heads(model):
    expected = model(IDS, use_cache=False).logits
    with running_on(model, "torch", recording=True) as hook:
        found = model(IDS, use_cache=False).logits
    assert hook.calls == 2
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    call = hook.recorded[1]
    assert (call.layer, call.causal, call.mask) == (1, True, None)
    assert call.q.shape == (2, 4, 20, 16)
    assert call.k.shape == call.v.shape == (2, 2, 20, 16)
    assert call.scale == pytest.approx(0.25)


def test_a_quantized_kernel_differs_from_the_host_a_little(model):
    expected = model(IDS, use_cache=False).logits
    with running_on(model, "fav3_fp8") as hook:
        found = model(IDS, use_cache=False).logits
    error = ((found - expected).abs().sum() / expected.abs().sum()).item()
    assert hook.calls == 2
    assert 1e-4 < error < 0.05


def test_padding_is_passed_on(model):
    padding = torch.ones_like(IDS)
    padding[1, 12:] = 0
    expected = model(IDS, attention_mask=padding, use_cache=False).logits
    with running_on(model, "torch", recording=True) as hook:
        found = model(IDS, attention_mask=padding, use_cache=False).logits
    assert hook.recorded[0].mask.dtype == torch.bool
    assert not hook.recorded[0].causal
    seen = padding.bool()
    torch.testing.assert_close(found[seen], expected[seen], atol=1e-5, rtol=1e-4)


def test_the_model_is_as_it_was(model):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = model.config._attn_implementation
    with pytest.raises(KeyError), running_on(model, "fav2"):
        raise KeyError
    assert model.config._attn_implementation == before
    assert NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys()


def test_what_would_be_ignored_is_refused(model):
    x = torch.ones(1, 1, 4, 16)
    with running_on(model, "torch") as hook:
        with pytest.raises(UnsupportedInputError, match="softcap"):
            hook(model, x, x, x, None, softcap=50.0)
        assert hook.calls == 0
        hook(model, x, x, x, None, softcap=None)
        assert hook.calls == 1
