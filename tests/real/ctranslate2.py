"""Reads the tensors of a CTranslate2 `model.bin`, version 6, and believes nothing that it says.

The file is a header (version, name and revision of the model's kind), then for each variable its
name, rank, dims, type and bytes; numbers are little-endian, names end with a zero byte.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import torch

VERSION = 6
MAX_BYTES = 2**30
MAX_VARIABLES = 10_000
MAX_RANK = 8
TYPES = {
    0: torch.float32,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.float16,
    5: torch.bfloat16,
}


class DamagedModelError(ValueError):
    """A file that is no CTranslate2 model of version 6, or part of one."""


class _Cursor:
    """A place in the file; reading past its end is an error, never a short answer."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> memoryview:
        if count > len(self._data) - self._at:
            raise DamagedModelError(f"{count} bytes are missing at byte {self._at}")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, code: str) -> int:
        size = struct.calcsize("<" + code)
        return int(struct.unpack("<" + code, self.take(size))[0])

    def text(self) -> str:
        raw = bytes(self.take(self.number("H")))
        if raw[-1:] != b"\0" or not raw[:-1].isascii():
            raise DamagedModelError(f"no name at byte {self._at}")
        return raw[:-1].decode("ascii")


def read_tensors(path: Path, *, kind: str, prefix: str = "") -> dict[str, torch.Tensor]:
    """The variables of a model, each a tensor of its own.

    Args:
        path: the file.
        kind: name of the model's kind, e.g. `"WhisperSpec"`.
        prefix: only names that start so are kept.

    Raises:
        DamagedModelError: it is cut short, of another version or kind, or contradicts itself.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise DamagedModelError(f"{path} has {size} bytes, at most {MAX_BYTES} are read")
    cursor = _Cursor(memoryview(bytearray(path.read_bytes())))
    version = cursor.number("I")
    if version != VERSION:
        raise DamagedModelError(f"{path} has version {version}, only {VERSION} is read")
    found, _revision = cursor.text(), cursor.number("I")
    if found != kind:
        raise DamagedModelError(f"{path} is a {found!r}, not a {kind!r}")
    count = cursor.number("I")
    if count > MAX_VARIABLES:
        raise DamagedModelError(f"{path} announces {count} variables")
    tensors: dict[str, torch.Tensor] = {}
    for _ in range(count):
        name = cursor.text()
        tensor = _variable(name, cursor)
        if name in tensors:
            raise DamagedModelError(f"{name} is there twice")
        tensors[name] = tensor
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _variable(name: str, cursor: _Cursor) -> torch.Tensor:
    rank = cursor.number("B")
    if rank > MAX_RANK:
        raise DamagedModelError(f"{name} has {rank} dimensions")
    dims = [cursor.number("I") for _ in range(rank)]
    code, size = cursor.number("B"), cursor.number("I")
    if code not in TYPES:
        raise DamagedModelError(f"{name} is of the unknown type {code}")
    dtype = TYPES[code]
    if 0 in dims or math.prod(dims) * dtype.itemsize != size:
        raise DamagedModelError(f"{name} has {size} bytes, which do not fill {dims} of {dtype}")
    raw = torch.frombuffer(cursor.take(size), dtype=torch.uint8).clone()
    return raw.view(dtype).view(dims)
