"""What the file of a captured grouped linear holds, and that of its weights."""

from __future__ import annotations

from sage_plugin.capture.record import LinearCapture
from sage_plugin.capture.store import linear_file
from sage_plugin.capture.store.file_kind import FileKind, Shapes, wrong_tensors

GROUP_SIZES, WEIGHT_RMS = "group_sizes", "weight_rms"
_OF_GROUPS = {GROUP_SIZES: "I32", WEIGHT_RMS: "F32"}


def line_problem(record: LinearCapture) -> str | None:
    """Tell what no line can say, or `None`."""
    if record.shape.groups < 1:
        return f"{record.file}: no groups"
    return linear_file.line_problem(record)


def shape_problem(record: LinearCapture, found: Shapes) -> str | None:
    """Tell how the tensors differ from what the line says, or `None`."""
    shape = record.shape
    expected: Shapes = {"x": (record.rows, shape.in_features)}
    expected |= dict.fromkeys(_OF_GROUPS, (shape.groups,))
    if shape.bias:
        expected["bias"] = (shape.groups, shape.out_features)
    return wrong_tensors(found, expected)


def dtype_problem(record: LinearCapture, dtypes: dict[str, str]) -> str | None:
    """Tell which types the tensors cannot have, or `None`."""
    for name, kind in _OF_GROUPS.items():
        if dtypes[name] != kind:
            return f"{record.file} holds {name} as {dtypes[name]}"
    return linear_file.dtype_problem(
        record, {n: d for n, d in dtypes.items() if n not in _OF_GROUPS}
    )


def weight_problem(record: LinearCapture, found: Shapes, dtypes: dict[str, str]) -> str | None:
    """Tell how a file differs from that of the weights, or `None`."""
    shape = record.shape
    expected: Shapes = {"weight": (shape.groups, shape.out_features, shape.in_features)}
    return wrong_tensors(found, expected) or linear_file.weight_type_problem(dtypes)


KIND = FileKind(
    LinearCapture, line_problem, shape_problem, dtype_problem, 4,
    "x, group_sizes, weight_rms and a bias", weight_problem,
)  # fmt: skip
