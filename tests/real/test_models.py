"""That the real models are themselves: small facts that wrong weights would not give."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.real import captured, inputs, models, outputs, weights

if weights.missing():
    pytest.skip(weights.missing(), allow_module_level=True)


@functools.cache
def smollm2():
    return captured.load("smollm2")


def test_smollm2_knows_the_capital_of_france():
    network, tokenizer = smollm2()
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = network(ids).logits[0, -1].argmax()
    assert tokenizer.decode(best).strip() == "Paris"


def test_smollm2_reads_the_text_at_its_known_perplexity():
    network, tokenizer = smollm2()
    found = outputs.output("smollm2", network, tokenizer, "sdpa")
    assert found.perplexity == pytest.approx(13.514, rel=0.002)
    assert (found.calls, found.kernel_calls) == (30, 0)


def test_minilm_knows_what_is_alike():
    network, tokenizer = captured.load("minilm")
    texts = ["A cat sits outside", "A feline rests outdoors", "Stock markets fell sharply today"]
    with torch.no_grad():
        hidden = network(**tokenizer(texts, padding=True, return_tensors="pt")).last_hidden_state
    cat, feline, stocks = hidden[:, 0]
    alike = torch.cosine_similarity(cat, feline, dim=0)
    assert alike > torch.cosine_similarity(cat, stocks, dim=0) + 0.1


def test_whisper_has_the_weights_of_every_layer_and_hears_the_sound():
    network = models.whisper()
    assert len(network.layers) == models.LAYERS["whisper"]
    with torch.no_grad():
        hidden = network(inputs.spectrogram()).last_hidden_state
    assert hidden.shape == (1, 1500, 384)
    # Syllables and pauses differ: neighbours are alike, moments a second apart less so.
    near = torch.cosine_similarity(hidden[0, :-1], hidden[0, 1:], dim=-1).mean()
    far = torch.cosine_similarity(hidden[0, :-50], hidden[0, 50:], dim=-1).mean()
    assert near > far + 0.05
    assert hidden.std().item() == pytest.approx(1.2846, rel=0.01)


@pytest.mark.parametrize(
    ("model", "count", "shape"),
    [
        ("smollm2", 30, (1, 9, 1300, 64)),
        ("minilm", 6, (2, 12, 362, 32)),
        ("whisper", 4, (1, 6, 1500, 64)),
        ("demo", captured.DEMO_CAPTURES, (2, 4, 2312, 64)),
    ],
)
def test_captured_sets(model, count, shape):
    found = captured.captured(model)
    assert len(found) == count
    for one in found:
        assert one.call.q.shape == shape
        assert one.call.q.dtype == torch.bfloat16
        assert torch.isfinite(one.call.q).all()
        assert one.call.causal == (model == "smollm2")
    if model == "minilm":
        assert found[0].call.mask[:, 0, 0].sum(-1).tolist() == [362, 124]
    assert len({one.name for one in found}) == count
