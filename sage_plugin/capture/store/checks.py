"""Whether a capture file is what its manifest line says; neither is believed."""

from __future__ import annotations

import math
from pathlib import Path

from safetensors import SafetensorError, safe_open

from sage_plugin.capture.store.paths import file_problem
from sage_plugin.schema import LAYOUTS, MASK_KINDS, CaptureRecord

MAX_CAPTURE_BYTES = 64 * 2**30
MOST_HEAD_BYTES = 64 * 2**10
MOST_TENSORS = 4
"""Q, K, V and a mask."""

_DIMS = ("batch", "heads_q", "heads_k", "seq_q", "seq_k", "head_dim", "dv")
_MASKS = {"none": None, "key_bias": "key_bias", "dense": "attn_mask"}
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""Types of Q, K and V by the names of the file format."""

_MASK_DTYPES = {"key_bias": ("F32",), "attn_mask": ("BOOL", "F16", "BF16", "F32", "F64")}


def capture_problem(folder: Path, record: CaptureRecord) -> str | None:
    """What is wrong with a capture, from its line and the head of its file; `None` if nothing."""
    problem = file_problem(folder, record.file) or _line_problem(record)
    if problem is not None:
        return problem
    path = folder / record.file
    try:
        if path.stat().st_size > MAX_CAPTURE_BYTES:
            return f"{record.file} is larger than {MAX_CAPTURE_BYTES} bytes"
        if _head_bytes(path) > MOST_HEAD_BYTES:
            return f"{record.file} is damaged (its head is larger than that of any capture)"
        with safe_open(path, framework="pt") as file:
            if len(file.keys()) > MOST_TENSORS:
                return (
                    f"{record.file} holds {len(file.keys())} tensors, expected q, k, v and a mask"
                )
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        return f"{record.file} cannot be read ({error.strerror or error})"
    except SafetensorError as error:
        return f"{record.file} is damaged ({error})"
    wrong = _shape_problem(record, found)
    if wrong is not None:
        return f"{record.file} does not match its manifest line ({wrong})"
    unknown = sorted({dtypes[name] for name in "qkv"} - _DTYPES.keys())
    if unknown or _DTYPES[dtypes["q"]] != record.shape.dtype:
        return f"{record.file} holds {unknown[0] if unknown else dtypes['q']} tensors"
    mask = _MASKS[record.shape.mask_kind]
    if mask is not None and dtypes[mask] not in _MASK_DTYPES[mask]:
        return f"{record.file} holds a mask of {dtypes[mask]}"
    return None


def _head_bytes(path: Path) -> int:
    """The length of a file's head, by its first number; the reader takes long over long ones."""
    with open(path, "rb") as stream:
        return int.from_bytes(stream.read(8), "little")


def _line_problem(record: CaptureRecord) -> str | None:
    shape = record.shape
    if any(getattr(shape, name) < 1 for name in _DIMS) or shape.heads_q % shape.heads_k:
        return f"{record.file}: impossible call shape"
    if shape.layout not in LAYOUTS or shape.mask_kind not in MASK_KINDS:
        return f"{record.file}: unknown layout {shape.layout!r} or mask kind {shape.mask_kind!r}"
    if not math.isfinite(shape.scale):
        return f"{record.file}: impossible scale {shape.scale}"
    for name, indices, limit in (
        ("batch", record.batch_indices, shape.batch),
        ("head", record.head_indices, shape.heads_k),
    ):
        if sorted({i for i in indices if 0 <= i < limit}) != list(indices) or not indices:
            return f"{record.file}: impossible {name} indices"
    return None


def _shape_problem(record: CaptureRecord, found: dict[str, tuple[int, ...]]) -> str | None:
    """How the tensors differ from what the line says, or `None`."""
    shape = record.shape
    items, heads = len(record.batch_indices), len(record.head_indices)
    queries = heads * (shape.heads_q // shape.heads_k)
    expected: dict[str, tuple[int, ...]] = {
        "q": (items, queries, shape.seq_q, shape.head_dim),
        "k": (items, heads, shape.seq_k, shape.head_dim),
        "v": (items, heads, shape.seq_k, shape.dv),
    }
    mask = _MASKS[shape.mask_kind]
    if mask is not None:
        tail = (shape.seq_k,) if mask == "key_bias" else (shape.seq_q, shape.seq_k)
        have = found.get(mask, ())
        if have[2:] != tail or have[0] not in (1, items) or have[1] not in (1, queries):
            return f"{mask} is {have or 'missing'}"
        expected[mask] = have
    if found.keys() != expected.keys():
        return f"tensors {', '.join(sorted(found))}, expected {', '.join(expected)}"
    wrong = [name for name in expected if found[name] != expected[name]]
    return f"{wrong[0]} is {found[wrong[0]]}, expected {expected[wrong[0]]}" if wrong else None
