"""Q, K and V of every attention layer of the real models, and of a few calls of the demo model."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.real import inputs, models
from tests.real.hook import Call, running_on

SETS = ("smollm2", "minilm", "whisper", "demo")
DEMO_CAPTURES = 8
DEMO_STEPS = 6


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """One recorded call, in the 16-bit dtype that a GPU would have run it in.

    Attributes:
        model: one of `SETS`.
        layer: the layer's number or path.
        call: the tensors.
    """

    model: str
    layer: str
    call: Call

    @property
    def name(self) -> str:
        """Model and layer, for a report."""
        return f"{self.model} {self.layer}"


@functools.cache
def captured(model: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Captured, ...]:
    """The calls of one set; the model ran in fp32 on the CPU, the tensors are rounded after it."""
    if model == "demo":
        found = _demo()
    else:
        found = [Captured(model, str(call.layer), call) for call in _calls(model)]
    return tuple(dataclasses.replace(one, call=_rounded(one.call, dtype)) for one in found)


def forward(
    model: str, network: Any, tokenizer: Any, *, tokens: int = inputs.TOKENS
) -> torch.Tensor:
    """What a real model gives for its fixed input: logits or last hidden state, fp32.

    Rows of padding are left out.
    """
    device, dtype = network.device, network.dtype
    with torch.no_grad():
        if model == "smollm2":
            ids = inputs.token_ids(tokenizer, tokens).to(device)
            return network(ids, use_cache=False).logits.float()
        if model == "minilm":
            batch = {n: t.to(device) for n, t in inputs.padded_passages(tokenizer).items()}
            return network(**batch).last_hidden_state.float()[batch["attention_mask"].bool()]
        return network(inputs.spectrogram().to(device, dtype)).last_hidden_state.float()


def load(model: str, **options: Any) -> tuple[Any, Any]:
    """A real model and its tokenizer; Whisper's encoder has none."""
    if model == "whisper":
        return models.whisper(**options), None
    return models.smollm2(**options) if model == "smollm2" else models.minilm(**options)


def _calls(model: str) -> list[Call]:
    network, tokenizer = load(model)
    with running_on(network, "sdpa", recording=True) as hook:
        forward(model, network, tokenizer)
    if hook.calls != models.LAYERS[model]:
        raise RuntimeError(f"{model} made {hook.calls} attention calls, not {models.LAYERS[model]}")
    return hook.recorded


def _demo() -> list[Captured]:
    """Calls of the demo video model, recorded by the product's own machinery."""
    from sage_plugin.capture.recording.recorder import record
    from sage_plugin.capture.store.reader import open_captures
    from sage_plugin.demo import load_pipeline

    pipe = load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "captures"
        with record(pipe, path, max_captures=DEMO_CAPTURES, total_steps=DEMO_STEPS):
            pipe(7, num_inference_steps=DEMO_STEPS, generator=generator)
        opened = open_captures(path)
        loaded = [opened.load(record) for record in opened.records]
    return [
        Captured(
            "demo",
            f"{saved.record.layer} step {saved.record.step}",
            Call(number, saved.q, saved.k, saved.v, None, False, saved.record.shape.scale),
        )
        for number, saved in enumerate(loaded)
    ]


def _rounded(call: Call, dtype: torch.dtype) -> Call:
    return dataclasses.replace(call, **{name: getattr(call, name).to(dtype) for name in "qkv"})
