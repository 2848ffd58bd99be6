"""Whether a capture's files are what its manifest line says; neither is believed."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from sage_plugin.capture.record import CaptureRecord
from sage_plugin.capture.store import attention_file, linear_file, paged_file
from sage_plugin.capture.store.file_kind import FileKind, Shapes
from sage_plugin.capture.store.paths import file_problem
from sage_plugin.paged_records import PAGED_ATTENTION
from sage_plugin.schema import ATTENTION, GROUPED_LINEAR, LINEAR

MAX_CAPTURE_BYTES = 64 * 2**30
MOST_HEAD_BYTES = 64 * 2**10

KINDS: dict[str, FileKind] = {
    ATTENTION: attention_file.KIND,
    LINEAR: linear_file.KIND,
    GROUPED_LINEAR: linear_file.GROUPED_KIND,
    PAGED_ATTENTION: paged_file.KIND,
}
"""The op families whose calls are captured."""


def capture_problem(folder: Path, record: CaptureRecord) -> str | None:
    """Tell what is wrong with a capture, by its line and the heads of its files, or `None`."""
    kind = KINDS[record.family]
    problem = file_problem(folder, record.file) or kind.line_problem(record)
    if problem is not None:
        return problem
    head = _head(folder / record.file, kind.most_tensors, kind.tensors)
    if isinstance(head, str):
        return head
    shapes, dtypes = head
    wrong = kind.shape_problem(record, shapes)
    if wrong is not None:
        return f"{record.file} does not match its manifest line ({wrong})"
    problems = [_shared(folder, name, record) for name in record.files[1:]]
    return next(filter(None, (kind.dtype_problem(record, dtypes), *problems)), None)


def _shared(folder: Path, name: str, record: CaptureRecord) -> str | None:
    """What is wrong with a file that a capture shares with others."""
    check = KINDS[record.family].shared_problem
    assert check is not None, "its family has such files"
    problem = file_problem(folder, name)
    head = problem or _head(folder / name, 1, "a weight")
    if isinstance(head, str):
        return f"{record.file}: {head}"
    wrong = check(record, *head)
    return None if wrong is None else f"{name} does not match {record.file} ({wrong})"


def _head(path: Path, most: int, words: str) -> tuple[Shapes, dict[str, str]] | str:
    """Shapes and types of a file's tensors by name, or why they cannot be read."""
    try:
        if path.stat().st_size > MAX_CAPTURE_BYTES:
            return f"{path.name} is larger than {MAX_CAPTURE_BYTES} bytes"
        if _head_bytes(path) > MOST_HEAD_BYTES:
            return f"{path.name} is damaged (its head is larger than that of any capture)"
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            if len(names) > most:
                return f"{path.name} holds {len(names)} tensors, expected {words}"
            slices = {name: file.get_slice(name) for name in names}
            shapes = {name: tuple(one.get_shape()) for name, one in slices.items()}
            return shapes, {name: one.get_dtype() for name, one in slices.items()}
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror or error})"
    except SafetensorError as error:
        return f"{path.name} is damaged ({error})"


def _head_bytes(path: Path) -> int:
    """The length of a file's head, by its first number; the reader takes long over long ones."""
    with open(path, "rb") as stream:
        return int.from_bytes(stream.read(8), "little")
