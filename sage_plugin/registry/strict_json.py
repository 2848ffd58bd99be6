"""Strict JSON: what our own files may hold, read from text that anybody may have written.

Python's reader accepts NaN, infinities, numbers that overflow to infinity and repeated names; a
file with one of those was not written by us. Deep nesting is an error, not a `RecursionError`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from sage_plugin.errors import ConfigError


def read(path: Path, limit: int, what: str) -> Any:  # noqa: ANN401
    """Read a file of strict JSON that may come from anywhere.

    Args:
        path: the file.
        limit: most bytes that such a file has.
        what: what no larger file is, for the error message.

    Raises:
        ConfigError: it cannot be read, is too large, is no UTF-8 or no strict JSON.
    """
    try:
        with open(path, "rb") as stream:
            content = stream.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    if len(content) > limit:
        raise ConfigError(f"{path}: larger than {limit} bytes, no {what} is")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: no text in UTF-8") from None
    return loads(text, str(path))


def loads(text: str, where: str) -> Any:  # noqa: ANN401
    """Parse strict JSON.

    Args:
        text: JSON text.
        where: the file (and line) that the error message names.

    Raises:
        ConfigError: not JSON, NaN or an infinity, a repeated name, or nesting too deep to read.

    Example:
        >>> loads('{"block_m": 64}', "example")
        {'block_m': 64}
    """
    try:
        return json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_unique_names,
        )
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply to be one of our files") from None
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON ({error})") from None


def dumps(value: object) -> str:
    """One line of JSON without NaN or infinities, fields in the order given.

    Raises:
        ConfigError: the value holds a number that JSON cannot carry.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ConfigError(f"cannot be written as JSON ({error})") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number that a file may hold")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} stands twice in one object")
    return result
