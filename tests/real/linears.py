"""Linears of the real models: what each got, and what an output loses when one is quantized."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import sage_plugin
from sage_plugin.capture.recording.recorder import record
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.families.linear import replay
from sage_plugin.families.linear.replay import LinearReplay
from sage_plugin.kernels.linear.api import apply
from tests.real import captured, inputs

KERNELS = ("fp8_row", "fp8_tensor", "int8_row")
ROWS = 512
EVERY = 10_000
DEMO_STEPS = 6
LINEARS = {"smollm2": 210, "minilm": 36, "whisper": 24, "demo": 24}
"""Linears of the blocks of each model, all but heads and embeddings."""
PERPLEXITY = {"fp8_row": 1.055, "fp8_tensor": 1.05, "int8_row": 1.04}
"""Largest factor on SmolLM2's perplexity, about 1.4 times the change that was measured."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedLinear:
    """One recorded call, in the 16-bit dtype that a GPU would have run it in.

    Attributes:
        model: one of `captured.SETS`.
        layer: module path, with the component in front.
        call: rows and weight.
    """

    model: str
    layer: str
    call: LinearReplay


def recorded(model: str, rows: int = ROWS) -> list[RecordedLinear]:
    """Record a call of each linear with the product's own machinery; the model runs in fp32.

    Tensors are rounded to bf16 after it.
    """
    steps = {"steps": DEMO_STEPS // 2} if model == "demo" else {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "captures"
        target, run = _subject(model)
        asked = {"max_captures": EVERY, "max_bytes": 2**40, "rows": rows, **steps}
        with record(target, path, ops="linear", **asked):
            run()
        opened = open_captures(path, "linear")
        found = []
        for one in opened.records:
            call = replay.captured(opened, one, "cpu")
            tensors = (
                None if t is None else t.bfloat16() for t in (call.x, call.weight, call.bias)
            )
            shape = call.shape.replaced(dtype="bfloat16")
            found.append(RecordedLinear(model, one.layer, LinearReplay(*tensors, shape)))  # type: ignore[arg-type]
    return found


def perplexity(tokenizer: Any, values: torch.Tensor, tokens: int) -> float:
    """Of the text, by the logits of SmolLM2."""
    ids = inputs.token_ids(tokenizer, tokens)
    return float(torch.nn.functional.cross_entropy(values[0, :-1], ids[0, 1:]).exp())


@contextlib.contextmanager
def on_kernel(network: Any, kernel: str, **options: Any) -> Iterator[int]:
    """Patch the linears of a model and leave its attention as it is, in a `with` block.

    Gives how many of them are quantized.
    """
    with sage_plugin.patched(network, kernel="sdpa", linears=kernel, **options) as handle:
        yield sum(row.kernel == kernel for row in handle.report().linears)


@contextlib.contextmanager
def one_on_kernel(network: Any, kernel: str, path: str) -> Iterator[int]:
    """Quantize one linear of a model, without the time that a patch takes of hundreds."""
    module = network.get_submodule(path)
    weight = sage_plugin.quantize_weight(module.weight, kernel)
    module.forward = functools.partial(apply, weight=weight, bias=module.bias)
    try:
        yield 1
    finally:
        del module.forward


def names(network: Any) -> list[str]:
    """Paths of the linears that a patch quantizes."""
    with sage_plugin.patched(network, kernel="sdpa", linears="int8_row") as handle:
        name = next(iter(handle.components))
        return [row.layer.removeprefix(f"{name}.") for row in handle.report().linears]


@functools.cache
def _pipe() -> Any:
    from sage_plugin.demo import load_pipeline

    pipe = load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _subject(model: str) -> tuple[Any, Any]:
    """What is recorded, and what runs it."""
    if model == "demo":
        pipe = _pipe()
        generator = torch.Generator().manual_seed(0)
        return pipe, lambda: pipe(7, num_inference_steps=DEMO_STEPS, generator=generator)
    network, tokenizer = captured.load(model)
    return network, lambda: captured.forward(model, network, tokenizer)
