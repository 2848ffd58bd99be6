"""Continuous batching of transformers on paged attention, on a tiny model and a CPU."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import sage_plugin
from sage_plugin.errors import (
    ConfigError,
    PatchError,
    UnknownKernelError,
    UnsupportedInputError,
    UsageError,
)
from sage_plugin.kernels.paged_attention.api import observers
from sage_plugin.kernels.paged_attention.call import PagedCall
from sage_plugin.plugin.hosts import batching_doors as doors
from sage_plugin.plugin.hosts.eight_bit_pages import CACHE
from sage_plugin.plugin.policy.rules import Policy, Rule

transformers = pytest.importorskip("transformers")
configuration = pytest.importorskip("transformers.generation.configuration_utils")
if not hasattr(configuration, "ContinuousBatchingConfig"):
    pytest.skip("this transformers has no such batching", allow_module_level=True)

PROMPTS = [[1, 5, 9, 2], [7] * 19, [3, 4]]


eight_bits = pytest.mark.skipif(
    importlib.util.find_spec(f"{CACHE}_allocators") is None,
    reason="this transformers has no caches that can hold 8 bits",
)


@pytest.fixture
def told() -> Iterator[list[PagedCall]]:
    """Calls of paged attention, as they are made."""
    calls: list[PagedCall] = []

    def observer(call: PagedCall, caller: object) -> None:
        calls.append(call)

    observers.append(observer)
    yield calls
    observers.remove(observer)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97, max_position_embeddings=512,
    )  # fmt: skip
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def generated(
    model: nn.Module, prompts: list[list[int]] = PROMPTS, *, tokens: int = 64, copies: int = 1,
    **others: object,
) -> list[list[int]]:  # fmt: skip
    known = inspect.signature(configuration.ContinuousBatchingConfig).parameters
    wishes = {"auto_switch_to_flash": False, "page_size": 16, "block_size": 16}
    own = {name: wish for name, wish in wishes.items() if name in known}
    own.pop("block_size" if "page_size" in known else "", None)
    batching = configuration.ContinuousBatchingConfig(
        **own, num_blocks=32, max_batch_tokens=tokens, **others
    )
    # of one token to draw from, since greedy texts cannot be asked for twice
    drawn = {"do_sample": True, "top_k": 1, "num_return_sequences": copies}
    greedy = transformers.GenerationConfig(
        max_new_tokens=12, eos_token_id=-1, pad_token_id=0,
        **(drawn if copies > 1 else {"do_sample": False}),
    )  # fmt: skip
    out = model.generate_batch(
        prompts, generation_config=greedy, continuous_batching_config=batching, progress_bar=False
    )
    return [out[name].generated_tokens for name in sorted(out)]


def replaced() -> list[object]:
    """What of transformers stands elsewhere while a handle is open."""
    return [getattr(doors._found(module), name, None) for module, name in (doors.GATE, doors.MAKER)]


def test_text_is_that_of_sdpa_and_pages_are_read_in_place(model: nn.Module) -> None:
    before = replaced()
    expected = generated(model)
    assert all(len(tokens) == 12 for tokens in expected)
    with sage_plugin.continuous_batching(model) as handle:
        assert generated(model) == expected
        assert all(now is not then for now, then in zip(replaced(), before, strict=True) if then)
        with pytest.raises(UnsupportedInputError, match="outside of generate_batch"):
            model(torch.tensor([[1, 2]]))
        with pytest.raises(PatchError, match="close its handle first"):
            sage_plugin.continuous_batching(model)
    # eleven tokens after the first, in two layers; the prompts are one batch
    assert (handle.decoded, handle.packed) == (22, 2)
    assert model.config._attn_implementation == "sdpa"
    assert all(now is then for now, then in zip(replaced(), before, strict=True))
    handle.close()  # which does nothing more


LONG = [*PROMPTS, list(range(60)), [*range(48), 3, 3]]
"""Two of them begin alike, which share pages; in batches of 24 tokens they come in parts."""


@eight_bits
@pytest.mark.parametrize(
    ("cache", "kernel"), [("int8", "auto"), ("int8", "qk_int8"), ("fp8", "auto")]
)
@pytest.mark.parametrize("tokens", [64, 24])
def test_caches_of_8_bits_tell_nearly_the_same(
    model: nn.Module, cache: str, kernel: str, tokens: int, told: list[PagedCall]
) -> None:
    expected = generated(model, LONG, tokens=tokens)
    with sage_plugin.continuous_batching(model, cache=cache, kernel=kernel) as handle:
        texts = generated(model, LONG, tokens=tokens)
    assert {call.k_cache.dtype for call in told} == {handle.dtype}
    assert handle.packed + handle.decoded == len(told)
    assert {call.kind() for call in told} == {"decode", "mixed"}
    # a text that takes another turn goes on otherwise: one of them does in FP8
    assert sum(x == y for x, y in zip(texts, expected, strict=True)) >= len(LONG) - (cache == "fp8")


@eight_bits
def test_forked_requests_take_the_scales_of_their_pages_along(model: nn.Module) -> None:
    (once,) = generated(model, PROMPTS[1:2])
    with sage_plugin.continuous_batching(model, cache="int8"):
        assert generated(model, PROMPTS[1:2], copies=3) == [once] * 3


@eight_bits
def test_scales_are_the_largest_magnitude_of_each_page_and_head(
    model: nn.Module, told: list[PagedCall]
) -> None:
    with sage_plugin.continuous_batching(model, cache="int8"):
        generated(model, [list(range(40))])
    call = told[0]  # of the first layer, behind the prompt
    used = call.page_table[0][call.page_table[0] >= 0].long()
    assert used.numel() == 3
    for cache, scale in ((call.k_cache, call.k_scale), (call.v_cache, call.v_scale)):
        assert scale is not None
        assert (cache[used].abs().amax((1, 3)) == 127).all()
        assert (scale[used] > 0).all()
        assert scale[used].unique().numel() == used.numel() * cache.shape[2]


@eight_bits
def test_what_8_bits_are_not_for_is_refused(model: nn.Module) -> None:
    window = transformers.MistralForCausalLM(
        transformers.MistralConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, vocab_size=97, sliding_window=8,
        )
    )  # fmt: skip
    with (
        sage_plugin.continuous_batching(window, cache="int8"),
        pytest.raises(UnsupportedInputError, match="layers of sliding_attention; 8-bit caches are"),
    ):
        generated(window)
    with (
        sage_plugin.continuous_batching(model, cache="int8"),
        pytest.raises(UnsupportedInputError, match=r"cpu_offload_space is 1.0; 8-bit caches"),
    ):
        generated(model, cpu_offload_space=1.0)
    for wrong, words in (
        (None, "NoneType has no generate_batch of transformers"),
        (type(model), "type has no generate_batch"),
    ):
        with pytest.raises(PatchError, match=words):
            sage_plugin.continuous_batching(wrong)
    for given, sentence in (
        ({"cache": "int4"}, "cache is 'int4'; choose one of auto, fp8, int8"),
        ({"cache": "fp8", "kernel": "qk_int8"}, "kernel 'qk_int8' quantizes queries as the cache"),
        ({"kernel": "qk_fp8"}, "and cache is 'auto'"),
    ):
        with pytest.raises(UsageError, match=sentence):
            sage_plugin.continuous_batching(model, **given)


@eight_bits
def test_rules_choose_the_kernel_of_each_layer(model: nn.Module, told: list[PagedCall]) -> None:
    rules = (
        Rule("sage", min_seq=9),  # for `patch`
        Rule("qk_int8", layers=("*layers.1.*",), op="paged_attention"),
        Rule("fav2", layers=("model.layers.*.self_attn.paged_attention",), op="paged_attention"),
    )
    with sage_plugin.continuous_batching(
        model, cache="int8", policy=Policy(1, rules, model="LlamaForCausalLM")
    ) as handle:
        kernels = [
            handle.kernel_of(layer.self_attn)
            for layer in model.model.layers  # type: ignore[union-attr]
        ]
        assert kernels == ["fav2", "qk_int8"]
        handle.rules.clear()
        generated(model)
    assert handle.rules == {2: len(told) // 2, 3: len(told) // 2}


@eight_bits
def test_a_policy_that_does_not_fit_is_refused(model: nn.Module) -> None:
    rule = Rule("qk_fp8", op="paged_attention")
    for given, error, sentence in (
        ({"policy": Policy(1, (rule,))}, UnsupportedInputError, "rule 1 of the policy: kernel 'qk"),
        ({"policy": Policy(1, (rule,), model="Other")}, ConfigError, "is for Other, and this is L"),
        (
            {"policy": Policy(1, (replace(rule, layers=("x",)),))},
            ConfigError,
            "such as model.model",
        ),
        ({"policy": "fast"}, ConfigError, "no rule of paged_attention; give it to sage_plugin.pat"),
        ({"policy": "fast", "kernel": "fav2"}, UsageError, "a policy names the kernels itself"),
    ):
        with pytest.raises(error, match=sentence):
            sage_plugin.continuous_batching(model, cache="int8", **given)
    assert model.config._attn_implementation == "sdpa"


@eight_bits
def test_a_manager_keeps_the_cache_that_it_was_made_with(model: nn.Module) -> None:
    with sage_plugin.continuous_batching(model, cache="int8"):
        manager = model.init_continuous_batching(
            generation_config=transformers.GenerationConfig(max_new_tokens=2, do_sample=False),
            continuous_batching_config=configuration.ContinuousBatchingConfig(
                page_size=16, num_blocks=8, max_batch_tokens=64
            ),
        )
        manager.warmup()
    cache = manager.batch_processor.cache
    new = torch.zeros(1, 2, 1, 16)
    with pytest.raises(UnsupportedInputError, match="is closed or has another; make a new manager"):
        cache.update(new, new, 0, {})


def test_what_it_cannot_patch_is_refused(model: nn.Module) -> None:
    with pytest.raises(PatchError, match="no generate_batch"):
        sage_plugin.continuous_batching(nn.Linear(2, 2))
    with pytest.raises(UnknownKernelError, match="choose one of auto"):
        sage_plugin.continuous_batching(model, kernel="sage")
    assert model.config._attn_implementation == "sdpa"
