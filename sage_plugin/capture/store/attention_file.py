"""What the file of a captured attention call holds."""

from __future__ import annotations

import math

from sage_plugin.capture.record import AttentionCapture
from sage_plugin.capture.store.file_kind import FileKind, Shapes, wrong_tensors
from sage_plugin.schema import LAYOUTS, MASK_KINDS

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


def line_problem(record: AttentionCapture) -> str | None:
    """Tell what no line can say, or `None`."""
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


def shape_problem(record: AttentionCapture, found: Shapes) -> str | None:
    """Tell how the tensors differ from what the line says, or `None`."""
    shape = record.shape
    items, heads = len(record.batch_indices), len(record.head_indices)
    queries = heads * (shape.heads_q // shape.heads_k)
    expected: Shapes = {
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
    return wrong_tensors(found, expected)


def dtype_problem(record: AttentionCapture, dtypes: dict[str, str]) -> str | None:
    """Tell which types the tensors cannot have, or `None`."""
    unknown = sorted({dtypes[name] for name in "qkv"} - _DTYPES.keys())
    if unknown or _DTYPES[dtypes["q"]] != record.shape.dtype:
        return f"{record.file} holds {unknown[0] if unknown else dtypes['q']} tensors"
    mask = _MASKS[record.shape.mask_kind]
    if mask is not None and dtypes[mask] not in _MASK_DTYPES[mask]:
        return f"{record.file} holds a mask of {dtypes[mask]}"
    return None


KIND = FileKind(
    AttentionCapture, line_problem, shape_problem, dtype_problem, 4, "q, k, v and a mask"
)
