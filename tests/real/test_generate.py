"""SmolLM2 writes the same text on our kernels: a long prompt at once, and token by token."""

from __future__ import annotations

import functools

import pytest
import torch

from sage_plugin.plugin.patch import patched
from tests.real import captured, inputs, models, weights

if weights.missing():
    pytest.skip(weights.missing(), allow_module_level=True)

pytestmark = pytest.mark.timeout(900)  # a hundred forwards of a real model on a CPU

PROMPT = 1100
WRITTEN = 100
LAYERS = models.LAYERS["smollm2"]


@functools.cache
def prepared():
    """The model in fp32, a prompt, and what it writes on torch's attention."""
    network, tokenizer = captured.load("smollm2")
    prompt = inputs.token_ids(tokenizer, PROMPT)
    assert prompt.shape[1] >= 1024
    return network, prompt, written(network, prompt)


def written(network, prompt):
    """The tokens of a greedy continuation."""
    with torch.no_grad():
        made = network.generate(
            prompt, max_new_tokens=WRITTEN, min_new_tokens=WRITTEN, do_sample=False
        )
    return made[:, prompt.shape[1] :]


@pytest.mark.parametrize("min_seq", [1024, 1])
def test_exact_attention_of_ours_writes_the_same_tokens(min_seq):
    """With `min_seq=1` decoding runs on the kernel too: one query against all keys."""
    network, prompt, expected = prepared()
    with patched(network, kernel="fav2", min_seq=min_seq) as handle:
        found = written(network, prompt)
    assert torch.equal(found, expected)
    rows = handle.report().rows
    assert len(rows) == LAYERS
    assert all(row.total_calls() == WRITTEN for row in rows)
    assert {row.kernel_calls() for row in rows} == {1 if min_seq == 1024 else WRITTEN}


def test_a_quantized_kernel_reads_the_prompt_and_nothing_else():
    network, prompt, expected = prepared()
    with patched(network, kernel="sage") as handle:
        found = written(network, prompt)
    assert all(row.kernel_calls() == 1 for row in handle.report().rows)
    assert (found == expected).float().mean() > 0.2  # until one close choice goes the other way
    assert found[0, 0] == expected[0, 0]
