"""Takes over captures that an earlier tool pickled: tensors and plain values of them, no code.

Such a file is a dict of `q`, `k` and `v` (or `query`, `key`, `value`), perhaps with `attn_mask`,
`is_causal`, `scale` and `layout`, beside each other or in a dict `kwargs`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sage_plugin import __version__
from sage_plugin.capture.call import CanonicalCall, canonical
from sage_plugin.capture.record import AttentionCapture, CaptureRecord
from sage_plugin.capture.selection.extract import extract
from sage_plugin.capture.selection.heads import Part
from sage_plugin.capture.selection.options import CaptureOptions
from sage_plugin.capture.store.manifest import CallCounts, ShapeCount
from sage_plugin.capture.store.writer import CaptureWriter
from sage_plugin.errors import CaptureError
from sage_plugin.kernels.contract import HOST, Decision
from sage_plugin.plugin.context import CallEvent
from sage_plugin.schema import ATTENTION, LAYOUTS, SCHEMA_VERSION, AnyShape

_NAMES = {"q": ("q", "query"), "k": ("k", "key"), "v": ("v", "value")}
_CAUSAL, _SCALE = ("is_causal", "causal"), ("scale", "sm_scale", "softmax_scale")
_NUMBERED = re.compile(r"(.*?)(?:_input)?_(\d{1,9})")
_METADATA = "_metadata"
"""Ends the name of a file beside the captures that holds none."""


@dataclass(frozen=True, slots=True)
class PtConversion:
    """What was taken over.

    Attributes:
        records: the captures that were written.
        found: files that there were.
        problems: a sentence for each file that was left out.
    """

    records: tuple[CaptureRecord, ...]
    found: int
    problems: tuple[str, ...]


def convert(
    folder: Path, out: Path, options: CaptureOptions, *, layout: str = "bhsd"
) -> PtConversion:
    """Write the tensors of a folder's `.pt` files as a capture folder.

    Args:
        folder: where they are.
        out: the capture folder.
        options: how many, how much of each, and whether `out` may be replaced.
        layout: of tensors whose file does not say.

    Raises:
        CaptureError: no such files, or none that can be taken over.
        OutputError: `out` cannot be written.
    """
    if not folder.is_dir():
        raise CaptureError(f"{folder} is not a folder of .pt files")
    paths = sorted(p for p in folder.glob("*.pt") if not p.stem.endswith(_METADATA))
    if not paths:
        raise CaptureError(f"{folder} holds no .pt files")
    count = min(options.max_captures, len(paths))
    chosen = [paths[(2 * i + 1) * len(paths) // (2 * count)] for i in range(count)]
    writer = CaptureWriter(out, overwrite=options.overwrite)
    writer.open()
    shapes: Counter[AnyShape] = Counter()
    layers: Counter[str] = Counter()
    problems = []
    try:
        for number, path in enumerate(chosen):
            taken = _take(path, number, options, layout)
            if isinstance(taken, str):
                problems.append(f"{path.name}: {taken}")
                continue
            tensors, record = taken
            saved = writer.save(tensors, record)
            shapes[saved.shape] += 1
            layers[saved.layer] += 1
    finally:
        rows = tuple(ShapeCount(shape, calls) for shape, calls in shapes.most_common())
        writer.close(CallCounts(complete=True, layers=dict(layers), shapes=rows))
    if not writer.records:
        raise CaptureError(f"{folder}: no file can be taken over: {'; '.join(problems[:3])}")
    return PtConversion(writer.records, len(paths), tuple(problems))


def _take(
    path: Path, number: int, options: CaptureOptions, layout: str
) -> tuple[dict[str, torch.Tensor], CaptureRecord] | str:
    """The tensors of a file and their manifest line, or why it is left out."""
    content = _load(path)
    if isinstance(content, str):
        return content
    event = _event(content, path, layout)
    call = event if isinstance(event, str) else canonical(event)
    if isinstance(event, str) or isinstance(call, str):
        return str(call)
    part = options.rule().choose(call)
    if isinstance(part, str):
        return part
    return extract(call, part), _record(event, call, part, number)


def _load(path: Path) -> Mapping[str, Any] | str:
    """The dict in a file; nothing but tensors and plain values is ever made of it."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of the unpickler, the archive or the disk
        first = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        if type(error).__name__ == "UnpicklingError":  # whose text tells how to run what it holds
            first = "it holds something else, or is damaged; nothing of it was run"
        return f"cannot be read as tensors and plain values alone ({first})"
    if not isinstance(content, dict):
        return f"holds a {type(content).__name__}, expected a dict of q, k and v"
    inner = content.get("kwargs")
    return {**inner, **content} if isinstance(inner, dict) else content


def _event(content: Mapping[str, Any], path: Path, layout: str) -> CallEvent | str:
    """The call that a file describes, or what is wrong with it."""
    tensors = {name: _first(content, names) for name, names in _NAMES.items()}
    missing = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
    if missing:
        return f"holds no tensor {missing[0]}"
    scale, mask = _first(content, _SCALE), content.get("attn_mask")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        return f"its scale is {scale!r}, expected a number"
    if mask is not None and not isinstance(mask, torch.Tensor):
        return f"its attn_mask is {type(mask).__name__}, expected a tensor"
    form = content.get("layout", layout)
    if form not in LAYOUTS:
        return f"its layout is {form!r}, expected one of {', '.join(LAYOUTS)}"
    numbered = _NUMBERED.fullmatch(path.stem)
    return CallEvent(
        component="pt",
        layer=f"pt.{numbered[1] if numbered else path.stem}",
        call_index=0,
        **tensors,
        attn_mask=mask,
        is_causal=_first(content, _CAUSAL) is True,
        scale=scale,
        layout=form,
        decision=Decision("sdpa", HOST),
    )


def _first(content: Mapping[str, Any], names: tuple[str, ...]) -> Any:  # noqa: ANN401
    return next((content[name] for name in names if content.get(name) is not None), None)


def _record(event: CallEvent, call: CanonicalCall, part: Part, number: int) -> AttentionCapture:
    return AttentionCapture(
        schema_version=SCHEMA_VERSION,
        family=ATTENTION,
        file="",
        layer=event.layer,
        step=number,
        timestep=None,
        call_index=0,
        shape=call.shape,
        batch_indices=part.batch,
        head_indices=part.heads,
        strides_q=event.q.stride(),
        strides_k=event.k.stride(),
        strides_v=event.v.stride(),
        text_length=None,
        model_class="",
        config_hash="",
        versions={"sage_plugin": __version__, "torch": torch.__version__},
        sha256="",
    )
