"""What the file of a captured call of paged attention holds."""

from __future__ import annotations

import math

from sage_plugin.capture.record import PagedCapture
from sage_plugin.capture.store.file_kind import FileKind, Shapes, wrong_tensors
from sage_plugin.paged_records import PagedShape

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DTYPES = _FLOATS | {"I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz"}
"""Types of caches by the names of the file format; Q has one of the first."""


def line_problem(record: PagedCapture) -> str | None:
    """Tell what no line can say, or `None`."""
    shape = record.shape
    sizes = (shape.heads_q, shape.heads_k, shape.head_dim, shape.page_size, shape.tokens)
    lengths = (*shape.q_lens, *shape.kv_lens)
    if (
        min(*sizes, 1 + min(lengths, default=-1)) < 1
        or len(shape.q_lens) != len(shape.kv_lens)
        or not 0 < max(shape.kv_lens) <= shape.max_keys
        or shape.max_keys % shape.page_size
        or shape.heads_q % shape.heads_k
    ):
        return f"{record.file}: impossible call shape"
    if not 1 <= record.rows <= shape.tokens:
        return f"{record.file}: {record.rows} saved rows of {shape.tokens}"
    if not 1 <= record.pages <= len(shape.kv_lens) * width(shape):
        return f"{record.file}: {record.pages} pages that no such call reads"
    if not math.isfinite(record.scale):
        return f"{record.file}: impossible scale {record.scale}"
    return None


def width(shape: PagedShape) -> int:
    """Return how many pages the longest sequence has, which the saved table has place for.

    Example:
        >>> width(PagedShape((1, 1), (40, 3), 4, 2, 8, "bfloat16", "int8", 16, 256))
        3
    """
    return -(-max(shape.kv_lens) // shape.page_size)


def shape_problem(record: PagedCapture, found: Shapes) -> str | None:
    """Tell how the tensors differ from what the line says, or `None`."""
    shape = record.shape
    expected: Shapes = {
        "q": (record.rows, shape.heads_q, shape.head_dim),
        "page_table": (len(shape.kv_lens), width(shape)),
    }
    if not record.holds_pages:
        expected |= dict.fromkeys(("k_moments", "v_moments"), (2, shape.heads_k, shape.head_dim))
        return wrong_tensors(found, expected)
    page = (record.pages, shape.page_size, shape.heads_k, shape.head_dim)
    expected |= dict.fromkeys(("k_cache", "v_cache"), page)
    if shape.cache_dtype not in _FLOATS.values():
        expected |= dict.fromkeys(("k_scale", "v_scale"), (record.pages, shape.heads_k))
    return wrong_tensors(found, expected)


def dtype_problem(record: PagedCapture, dtypes: dict[str, str]) -> str | None:
    """Tell which types the tensors cannot have, or `None`."""
    shape, known = record.shape, dict.fromkeys(dtypes, "float32")
    known |= {"q": shape.dtype, "page_table": "int32"}
    known |= {name: shape.cache_dtype for name in ("k_cache", "v_cache") if name in dtypes}
    for name, found in dtypes.items():
        if (_DTYPES | {"I32": "int32"}).get(found) != known[name]:
            return f"{record.file} holds {name} as {found}"
    unknown = shape.dtype not in _FLOATS.values() or shape.cache_dtype not in _DTYPES.values()
    return f"{record.file}: unknown types of its call" if unknown else None


KIND = FileKind(
    PagedCapture, line_problem, shape_problem, dtype_problem, 6,
    "q, page_table, and caches with scales or moments",
)  # fmt: skip
