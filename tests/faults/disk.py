"""A disk that fails: each call that writes may raise, the n-th alone or all from the n-th on."""

from __future__ import annotations

import builtins
import errno
import io
import os
from typing import Any

CALLS = ("replace", "rename", "unlink", "fsync", "mkdir", "chmod", "ftruncate")
"""Functions of `os` that change a file system."""


class Disk:
    """Counts the calls that write, and lets one or more of them fail.

    Args:
        fails_at: number of the first call that fails, from 0; `None` for none.
        lasting: whether all later ones fail too.
        code: what the system says.
    """

    def __init__(
        self, fails_at: int | None = None, *, lasting: bool = False, code: int = errno.ENOSPC
    ) -> None:
        self.fails_at, self.lasting, self.code = fails_at, lasting, code
        self.calls = 0
        self._stock: dict[str, Any] = {}

    def _count(self) -> None:
        number, self.calls = self.calls, self.calls + 1
        if self.fails_at is None:
            return
        if number == self.fails_at or (self.lasting and number > self.fails_at):
            raise OSError(self.code, os.strerror(self.code))

    def __enter__(self) -> Disk:
        for name in CALLS:
            self._stock[name] = stock = getattr(os, name)
            setattr(os, name, self._counted(stock))
        self._stock["open"], self._stock["os.open"] = io.open, os.open
        io.open = builtins.open = self._open
        os.open = self._os_open
        return self

    def __exit__(self, *_: object) -> None:
        for name in CALLS:
            setattr(os, name, self._stock[name])
        io.open = builtins.open = self._stock["open"]
        os.open = self._stock["os.open"]

    def _counted(self, stock: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self._count()
            return stock(*arguments, **options)

        return call

    def _os_open(self, path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            self._count()
        return int(self._stock["os.open"](path, flags, *arguments, **options))

    def _open(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if not set(mode) & set("wax+"):
            return self._stock["open"](file, mode, *arguments, **options)
        if "opener" not in options:
            self._count()
        return _Stream(self._stock["open"](file, mode, *arguments, **options), self._count)


class _Stream:
    """A file whose writes may fail."""

    def __init__(self, stream: Any, count: Any) -> None:
        self._stream, self._count = stream, count

    def write(self, data: Any) -> Any:
        self._count()
        return self._stream.write(data)

    def truncate(self, *size: int) -> Any:
        self._count()
        return self._stream.truncate(*size)

    def __enter__(self) -> _Stream:
        self._stream.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
