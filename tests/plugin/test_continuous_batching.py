"""Continuous batching of transformers on paged attention, on a tiny model and a CPU."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import sage_plugin
from sage_plugin.errors import PatchError, UnknownKernelError, UnsupportedInputError
from sage_plugin.plugin.hosts import continuous_batching as host

transformers = pytest.importorskip("transformers")
configuration = pytest.importorskip("transformers.generation.configuration_utils")
if not hasattr(configuration, "ContinuousBatchingConfig"):
    pytest.skip("this transformers has no such batching", allow_module_level=True)

PROMPTS = [[1, 5, 9, 2], [7] * 19, [3, 4]]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97, max_position_embeddings=512,
    )  # fmt: skip
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def generated(model: nn.Module, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    known = inspect.signature(configuration.ContinuousBatchingConfig).parameters
    wishes = {"auto_switch_to_flash": False, "page_size": 16, "block_size": 16}
    own = {name: wish for name, wish in wishes.items() if name in known}
    own.pop("block_size" if "page_size" in known else "", None)
    batching = configuration.ContinuousBatchingConfig(**own, num_blocks=16, max_batch_tokens=64)
    greedy = transformers.GenerationConfig(
        max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    out = model.generate_batch(
        prompts, generation_config=greedy, continuous_batching_config=batching, progress_bar=False
    )
    return [out[name].generated_tokens for name in sorted(out)]


def test_text_is_that_of_sdpa_and_pages_are_read_in_place(model: nn.Module) -> None:
    gate = host._initialization().ensure_decode_fast_path_is_available
    expected = generated(model)
    assert all(len(tokens) == 12 for tokens in expected)
    with sage_plugin.continuous_batching(model) as handle:
        assert generated(model) == expected
        with pytest.raises(UnsupportedInputError, match="outside of generate_batch"):
            model(torch.tensor([[1, 2]]))
        with pytest.raises(PatchError, match="close its handle first"):
            sage_plugin.continuous_batching(model)
    # eleven tokens after the first, in two layers; the prompts are one batch
    assert (handle.decoded, handle.packed) == (22, 2)
    assert model.config._attn_implementation == "sdpa"
    assert host._initialization().ensure_decode_fast_path_is_available is gate
    handle.close()  # which does nothing more


def test_what_it_cannot_patch_is_refused(model: nn.Module) -> None:
    with pytest.raises(PatchError, match="no generate_batch"):
        sage_plugin.continuous_batching(nn.Linear(2, 2))
    with pytest.raises(UnknownKernelError, match="choose one of auto"):
        sage_plugin.continuous_batching(model, kernel="sage")
    assert model.config._attn_implementation == "sdpa"
