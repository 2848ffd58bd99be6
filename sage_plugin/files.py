"""Files of ours: written whole or not at all, and read as what anybody may have written.

Python's JSON reader accepts NaN, infinities, numbers that overflow to infinity and repeated names;
a file with one of those was not written by us. Deep nesting is an error, not a `RecursionError`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sage_plugin.errors import ConfigError, OutputError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system says about writing a file into an `OutputError` that names it."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error})") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a new file to fill, which takes a file's place once all of it is on the disk.

    Args:
        path: the file, which need not exist; its folder does.

    Yields:
        An empty file beside it, with the permissions of any new file of this user. An error in the
        block deletes it and leaves the old file as it was.
    """
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    # Not `tempfile`: its files are readable by the owner alone, ours are for all users.
    descriptor = os.open(temporary, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o666)
    mode = os.fstat(descriptor).st_mode & 0o777
    os.close(descriptor)
    try:
        yield temporary
        temporary.chmod(mode)
        with open(temporary, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file's content in one step: a reader sees the old content or the new, never a part.

    Raises:
        OutputError: the file cannot be written.
    """
    with writing(path), replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, data: object) -> None:
    """Replace a JSON file in one step.

    Raises:
        OutputError: it cannot be written.
    """
    write_atomically(path, json.dumps(data, indent=1) + "\n")


def append_line(path: Path, line: str) -> None:
    """Add a line and wait until it is on the disk; one that does not fit is taken back.

    A last line that was cut short when a writer died stays a line of its own.

    Raises:
        OutputError: the file cannot be written.
    """
    with writing(path), open(path, "ab+", buffering=0) as stream:
        end = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, end - 1))
        content = (b"\n" if stream.read(1) not in (b"", b"\n") else b"") + line.encode() + b"\n"
        try:
            if stream.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(stream.fileno())
        except OSError:
            stream.truncate(end)
            raise


def read_bytes(path: Path, limit: int, what: str) -> bytes:
    """Read a small file that may come from anywhere.

    Args:
        path: the file.
        limit: most bytes that such a file has.
        what: what no larger file is, for the error message.

    Raises:
        ConfigError: it cannot be read, or is too large.
    """
    try:
        with open(path, "rb") as stream:
            content = stream.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    if len(content) > limit:
        raise ConfigError(f"{path}: larger than {limit} bytes, no {what} is")
    return content


def read_text(path: Path, limit: int, what: str) -> str:
    """Read a small file of text; arguments and errors as of `read_bytes`, or it is no UTF-8."""
    try:
        return read_bytes(path, limit, what).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None


def read_json(path: Path, limit: int, what: str) -> Any:  # noqa: ANN401
    """Read a file of strict JSON; arguments and errors as of `read_text`, or no strict JSON."""
    return loads(read_text(path, limit, what), str(path))


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
