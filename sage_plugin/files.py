"""Files of ours: written whole or not at all, and read as what anybody may have written.

Python's JSON reader accepts NaN, infinities, numbers that overflow to infinity and repeated names;
a file with one of those was not written by us. Deep nesting is an error, not a `RecursionError`.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import math
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from sage_plugin.errors import ConfigError, OutputError, SageError

NO_SUCH_FILE = "no such file"
NOT_REGULAR = "not a regular file"

STRAY_AGE_S = 3600.0
"""A temporary file of this age belongs to no writer that is alive."""

LARGEST_INTEGER = 2**63 - 1
"""No size, count or length of ours is larger, and floats hold its products."""

STANDARD = {"stdout": 1, "stderr": 2}
DESCRIPTORS = re.compile(r"/dev/(stdout|stderr)|/(?:dev|proc/self)/fd/(\d+)")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system says about writing a file into an `OutputError` that names it."""
    try:
        yield
    except SageError:
        raise
    except (OSError, ValueError) as error:  # a path with NUL is a ValueError
        raise OutputError(f"{path}: cannot be written ({_reason(error)})") from error


@contextlib.contextmanager
def replacing(path: Path, *, follow: bool = True) -> Iterator[Path]:
    """Give a new file to fill, which takes a file's place once all of it is on the disk.

    A device, a pipe or an open descriptor (`/dev/stdout`) is written to and never replaced.

    Args:
        path: the file, which need not exist; its folder does.
        follow: write to what a link points to, as a user means who names one. Without it the link
            itself is replaced, so that nobody leads us out of a folder of ours.

    Yields:
        An empty file, with the permissions of any new file of this user. An error in the block
        deletes it and leaves the old file as it was.
    """
    stream = _stream_of(path) if follow else None
    if stream is not None:
        with tempfile.TemporaryDirectory() as folder:
            filled = Path(folder) / "content"
            filled.touch()
            yield filled
            with stream as into, open(filled, "rb") as content:
                shutil.copyfileobj(content, into)
        return
    target = Path(os.path.realpath(path) if follow else os.path.abspath(path))
    remove_strays(target, older_than_s=STRAY_AGE_S)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    # Not `tempfile`: its files are readable by the owner alone, ours are for all users.
    descriptor = os.open(temporary, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o666)
    mode = os.fstat(descriptor).st_mode & 0o777
    os.close(descriptor)
    try:
        yield temporary
        temporary.chmod(mode)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _stream_of(path: Path) -> BinaryIO | None:
    """What a path names if that is no file: an open descriptor, a device, a pipe."""
    number = DESCRIPTORS.fullmatch(str(path))
    if number is not None:
        sys.stdout.flush()
        return open(os.dup(STANDARD.get(number[1]) or int(number[2])), "wb")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else open(path, "wb")


def remove_strays(target: Path, *, older_than_s: float) -> None:
    """Delete what writers of a file left behind that were killed."""
    latest = time.time() - older_than_s
    with contextlib.suppress(OSError):
        for stray in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
            with contextlib.suppress(OSError):
                if stray.lstat().st_mtime <= latest:
                    stray.unlink()


def write_atomically(path: Path, content: str | bytes, *, follow: bool = True) -> None:
    """Replace a file's content in one step: a reader sees the old content or the new, never a part.

    Args:
        path: the file.
        content: its new content; text is written as UTF-8.
        follow: as of `replacing`.

    Raises:
        OutputError: the file cannot be written.
    """
    with writing(path), replacing(path, follow=follow) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, data: object, *, follow: bool = True) -> None:
    """Replace a JSON file in one step; arguments and errors as of `write_atomically`."""
    write_atomically(path, json.dumps(data, indent=1) + "\n", follow=follow)


def touch(path: Path, *, new: bool) -> None:
    """See that a file of ours can be written; make it, if it is to be `new`.

    Raises:
        OutputError: it cannot, is there already, or is a link.
    """
    with writing(path), open(path, "xb" if new else "ab", opener=_open_itself):
        pass


def append_line(path: Path, line: str) -> None:
    """Add a line and wait until it is on the disk; one that does not fit is taken back.

    A last line that was cut short when a writer died stays a line of its own.

    Raises:
        OutputError: the file cannot be written, is a link, or no regular file.
    """
    with writing(path), open(path, "ab+", buffering=0, opener=_open_itself) as stream:
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


def _open_itself(path: str, flags: int) -> int:
    """Open a file to write that is neither behind a link nor a pipe or a device."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, NOT_REGULAR)
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def read_bytes(path: Path, limit: int, what: str) -> bytes:
    """Read a small file that may come from anywhere.

    Args:
        path: the file.
        limit: most bytes that such a file has.
        what: what no larger file is, for the error message.

    Raises:
        ConfigError: it cannot be read, is no regular file, or is too large.
    """
    with _reading(path) as stream:
        # The size that is asked for is allocated, so not more of it than the file has.
        content: bytes = stream.read(min(limit, os.fstat(stream.fileno()).st_size) + 1)
    if len(content) > limit:
        raise ConfigError(f"{path}: larger than {limit} bytes, no {what} is")
    return content


def read_lines(path: Path, longest: int) -> Iterator[bytes | None]:
    """Read a file of lines one by one, `None` for each that is longer than `longest` bytes.

    Raises:
        ConfigError: it cannot be read, or is no regular file.
    """
    with _reading(path) as stream:
        while line := stream.readline(longest + 1):
            if len(line) <= longest or line.endswith(b"\n"):
                yield line
                continue
            while (rest := stream.readline(longest)) and not rest.endswith(b"\n"):
                pass
            yield None


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file; what else a path may name is refused before it is opened."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ConfigError(f"{path}: {NOT_REGULAR}")
        with open(path, "rb", opener=_open_at_once) as stream:
            yield stream
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path}: {NO_SUCH_FILE}") from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({_reason(error)})") from None


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for the other end, should the file have become a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _reason(error: OSError | ValueError) -> str:
    return str(getattr(error, "strerror", None) or error)


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
        ConfigError: not JSON, NaN or an infinity, a whole number beyond 64 bits, a repeated name,
            or nesting too deep to read.

    Example:
        >>> loads('{"block_m": 64}', "example")
        {'block_m': 64}
    """
    try:
        return json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_bounded,
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


def _bounded(text: str) -> int:
    if len(text) > 20 or abs(value := int(text)) > LARGEST_INTEGER:
        raise ValueError(f"a whole number of {len(text)} digits is too large")
    return value


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the name {name!r} stands twice in one object")
        result[name] = value
    return result
