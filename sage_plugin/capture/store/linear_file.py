"""What the file of a captured linear holds, and that of its weight."""

from __future__ import annotations

from sage_plugin.capture.record import LinearCapture
from sage_plugin.capture.store.file_kind import FileKind, Shapes, wrong_tensors
from sage_plugin.capture.store.paths import is_plain_name

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of inputs by the names of the file format."""


def line_problem(record: LinearCapture) -> str | None:
    """Tell what no line can say, or `None`."""
    shape = record.shape
    if min(shape.rows, shape.in_features, shape.out_features) < 1:
        return f"{record.file}: impossible call shape"
    if not 1 <= record.rows <= shape.rows:
        return f"{record.file}: {record.rows} saved rows of {shape.rows}"
    if record.weight_file and not is_plain_name(record.weight_file):
        return f"{record.weight_file!r} is not a plain file name of a weight"
    return None


def shape_problem(record: LinearCapture, found: Shapes) -> str | None:
    """Tell how the tensors differ from what the line says, or `None`."""
    expected: Shapes = {"x": (record.rows, record.shape.in_features)}
    if record.shape.bias:
        expected["bias"] = (record.shape.out_features,)
    return wrong_tensors(found, expected)


def dtype_problem(record: LinearCapture, dtypes: dict[str, str]) -> str | None:
    """Tell which types the tensors cannot have, or `None`."""
    unknown = sorted(set(dtypes.values()) - _DTYPES.keys())
    if unknown or _DTYPES[dtypes["x"]] != record.shape.dtype:
        return f"{record.file} holds {unknown[0] if unknown else dtypes['x']} tensors"
    return None


def weight_problem(record: LinearCapture, found: Shapes, dtypes: dict[str, str]) -> str | None:
    """Tell how a file differs from that of the weight, or `None`."""
    expected: Shapes = {"weight": (record.shape.out_features, record.shape.in_features)}
    return wrong_tensors(found, expected) or weight_type_problem(dtypes)


def weight_type_problem(dtypes: dict[str, str]) -> str | None:
    """Tell that a weight has a type that none has, or `None`."""
    return None if dtypes["weight"] in _DTYPES else f"weight is {dtypes['weight']}"


KIND = FileKind(
    LinearCapture, line_problem, shape_problem, dtype_problem, 2, "x and a bias", weight_problem
)
