"""What the file of a captured linear, grouped or not, holds, and that of its weights."""

from __future__ import annotations

import hashlib

import torch

from sage_plugin.capture.record import LinearCapture
from sage_plugin.capture.store.file_kind import FileKind, Shapes, wrong_tensors
from sage_plugin.capture.store.paths import is_plain_name
from sage_plugin.schema import GROUPED_LINEAR

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of inputs by the names of the file format."""

GROUP_SIZES, WEIGHT_RMS = "group_sizes", "weight_rms"
_OF_GROUPS = {GROUP_SIZES: "I32", WEIGHT_RMS: "F32"}
"""What a grouped linear has beside, and its types."""


def line_problem(record: LinearCapture) -> str | None:
    """Tell what no line can say, or `None`."""
    shape = record.shape
    if record.family == GROUPED_LINEAR and shape.groups < 1:
        return f"{record.file}: no groups"
    if min(shape.rows, shape.in_features, shape.out_features) < 1:
        return f"{record.file}: impossible call shape"
    if not 1 <= record.rows <= shape.rows:
        return f"{record.file}: {record.rows} saved rows of {shape.rows}"
    if record.weight_file and not is_plain_name(record.weight_file):
        return f"{record.weight_file!r} is not a plain file name of a weight"
    return None


def shape_problem(record: LinearCapture, found: Shapes) -> str | None:
    """Tell how the tensors differ from what the line says, or `None`."""
    shape = record.shape
    groups = (shape.groups,) if shape.groups else ()
    expected: Shapes = {"x": (record.rows, shape.in_features)}
    expected |= dict.fromkeys(_OF_GROUPS if groups else (), groups)
    if shape.bias:
        expected["bias"] = (*groups, shape.out_features)
    return wrong_tensors(found, expected)


def dtype_problem(record: LinearCapture, dtypes: dict[str, str]) -> str | None:
    """Tell which types the tensors cannot have, or `None`."""
    for name, kind in (_OF_GROUPS if record.shape.groups else {}).items():
        if dtypes[name] != kind:
            return f"{record.file} holds {name} as {dtypes[name]}"
    unknown = sorted({d for n, d in dtypes.items() if n not in _OF_GROUPS} - _DTYPES.keys())
    if unknown or _DTYPES[dtypes["x"]] != record.shape.dtype:
        return f"{record.file} holds {unknown[0] if unknown else dtypes['x']} tensors"
    return None


def weight_problem(record: LinearCapture, found: Shapes, dtypes: dict[str, str]) -> str | None:
    """Tell how a file differs from that of the weights, or `None`."""
    shape = record.shape
    groups = (shape.groups,) if shape.groups else ()
    expected: Shapes = {"weight": (*groups, shape.out_features, shape.in_features)}
    problem = wrong_tensors(found, expected)
    if problem is None and dtypes["weight"] not in _DTYPES:
        return f"weight is {dtypes['weight']}"
    return problem


def weight_hash(weight: torch.Tensor) -> str:
    """Return SHA-256 of a tensor's bytes, row by row, in its own dtype.

    Example:
        >>> weight_hash(torch.zeros(2, 2)) == weight_hash(torch.zeros(4))
        True
    """
    raw = weight.detach().contiguous().cpu().view(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().data).hexdigest()


_CHECKS = (LinearCapture, line_problem, shape_problem, dtype_problem)
KIND = FileKind(*_CHECKS, 2, "x and a bias", weight_problem)
GROUPED_KIND = FileKind(*_CHECKS, 4, "x, group_sizes, weight_rms and a bias", weight_problem)
