"""Recordings of a small model with layers and steps, and times of a GPU that nobody has."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from sage_plugin.capture.store.manifest import CallCounts, LayerCalls, ShapeCount
from sage_plugin.capture.store.writer import CaptureWriter
from sage_plugin.measure.inputs import Tensors, self_attention, synthetic
from sage_plugin.plugin.policy.step_range import Band
from sage_plugin.schema import CallShape
from sage_plugin.tune.policy.grid import Grid, PolicyCell
from sage_plugin.tune.policy.request import PolicyRequest
from tests.bench.folders import record_of

LAYERS = tuple(f"transformer.blocks.{i}.attn1" for i in range(3))
SHAPE = self_attention(1, 2, 64, 32)
CROSS = dataclasses.replace(SHAPE, seq_k=40)
STEPS = 4
PER_STEP = 2
"""Calls of a layer in a step."""

MS = {"sdpa": 1.0, "sage": 0.8, "fav3_sage": 0.6, "fav3_fp8": 0.55}
DEVICE = "a GPU"

EVERYWHERE = {(layer, step): "biased" for layer in range(len(LAYERS)) for step in (0, 3)}
"""A capture of each layer in each of two bands."""


def drawn(layer: int, step: int, distribution: str, shape: CallShape = SHAPE) -> Tensors:
    """What the capture of a layer at a step holds."""
    seed = 100 * layer + step
    q, k, v = synthetic(
        shape,
        device="cpu",
        seed=seed,
        distribution="normal" if distribution == "nan" else distribution,
    )
    if distribution == "nan":
        v[0, 0, 3, 5] = float("nan")
    return q, k, v


def write(
    folder: Path,
    captured: Mapping[tuple[int, int], str] = EVERYWHERE,
    *,
    layers: Sequence[str] = LAYERS,
    steps: int | None = STEPS,
    runs: int = 1,
    per_step: int = PER_STEP,
    shapes: Sequence[CallShape] = (SHAPE,),
    uncounted: int = 0,
    counts: Mapping[str, object] = {},
) -> Path:
    """Write captures by layer and step, and counts of as many calls of each layer at each step.

    Args:
        folder: made anew.
        captured: distribution of the capture of a layer at a step, `"nan"` for a damaged one.
        layers: all layers that were called.
        steps: denoising steps of a run.
        runs: denoising runs.
        per_step: calls of a layer in a step of a run.
        shapes: all layers have calls of all of these; the first one is captured.
        uncounted: calls that are in no layer's counts by step.
        counts: fields of the counts in place of those.
    """
    writer = CaptureWriter(folder)
    writer.open()
    for (layer, step), distribution in captured.items():
        q, k, v = drawn(layer, step, distribution, shapes[0])
        heads = tuple(range(shapes[0].heads_k))
        record = dataclasses.replace(
            record_of(shapes[0], heads=heads, batches=(0,), step=step),
            layer=layers[layer],
            denoising_step=None if steps is None else step,
        )
        writer.save({"q": q, "k": k, "v": v}, record)
    each = per_step * runs
    calls = (each,) * (steps or 1)
    total = each * (steps or 1) * len(shapes)
    seen = CallCounts(
        complete=True,
        layers=dict.fromkeys(layers, total) | ({"vae.attn": uncounted} if uncounted else {}),
        shapes=tuple(ShapeCount(shape, total * len(layers)) for shape in shapes),
        denoising_steps=steps,
        runs=runs if steps else 0,
        layer_calls=tuple(
            LayerCalls(layer, number, calls) for layer in layers for number in range(len(shapes))
        ),
    )
    writer.close(dataclasses.replace(seen, **counts))
    return folder


def times(path: Path, ms: Mapping[str, float] = MS, shapes: Sequence[CallShape] = (SHAPE,)) -> Path:
    """Write what `sage bench --json` writes, as far as a search reads it."""
    rows = [
        {"note": "", "kernel": name, "shape": shape.to_json(), "time": {"median_ms": value}}
        for shape in shapes
        for name, value in ms.items()
    ]
    path.write_text(json.dumps({"device": {"name": DEVICE}, "tables": [{"rows": rows}]}))
    return path


def request(folder: Path, **changes: object) -> PolicyRequest:
    """A search on the recording `folder/captures` with the times `folder/times.json`."""
    base = PolicyRequest(
        folder / "captures",
        times=(folder / "times.json",),
        device="cpu",
        step_ranges=2,
        min_seq=16,
        runs_dir=folder / "runs",
        run_name="r",
    )
    if "max_ms" not in changes:
        base = dataclasses.replace(base, max_error=0.03)
    return dataclasses.replace(base, **changes)


def grid(
    layers: int, bands: Sequence[str], steps: int | None, missing: Sequence[tuple[int, int]] = ()
) -> Grid:
    """A grid whose every cell holds one call a step."""
    names = tuple(f"transformer.blocks.{i}.attn1" for i in range(layers))
    cells = {}
    for layer in range(layers):
        for number, text in enumerate(bands):
            if (layer, number) in missing:
                continue
            band = Band.parse(text)
            calls = sum(band.contains(step, steps) for step in range(steps or 1))
            cells[layer, number] = PolicyCell(
                (layer, number), names[layer], text, ((SHAPE, float(calls)),)
            )
    total = sum(cell.calls_per_run for cell in cells.values())
    return Grid(names, tuple(bands), cells, steps, total)


def ledger_lines(folder: Path) -> list[str]:
    """Lines of the search's ledger."""
    return (folder / "runs" / "r" / "ledger.jsonl").read_text().splitlines()
