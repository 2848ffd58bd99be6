"""Smoothing factors of linears' inputs, in the file that `sage policy smoothing` writes.

A safetensors file: for each linear, by its path with the component in front, one fp32 factor an
input channel. Linears that read one tensor have equal factors, so that it is quantized once for
all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sage_plugin import files
from sage_plugin.errors import ConfigError

KIND, SCHEMA_VERSION = "smoothing", "1"
HEADER = {"sage_plugin": KIND, "schema_version": SCHEMA_VERSION}
"""In the metadata of a file; written by `tune/policy/smoothing.py`."""
LENGTH = 8
"""Bytes of the number that says how long the header of a safetensors file is."""
MAX_FILE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, eq=False)
class Smoothing:
    """What channels of linears' inputs are divided by before they are quantized.

    Attributes:
        path: the file that it comes from.
        factors: `(K,)` fp32 by path of the linear with the component in front; equal ones are the
            same tensor.
    """

    path: str
    factors: Mapping[str, torch.Tensor]

    def of(self, layer: str) -> torch.Tensor | None:
        """Return the factors of a linear, `None` if there are none.

        Args:
            layer: its path with the component in front, which may be called otherwise here.
        """
        found = self.factors.get(layer)
        if found is None:
            bare = layer.partition(".")[2]
            alike = [name for name in self.factors if name.partition(".")[2] == bare]
            found = self.factors[alike[0]] if len(alike) == 1 else None
        return found


def read(path: str | os.PathLike[str]) -> Smoothing:
    """Read a file of factors.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    name = os.path.expanduser(path)
    data = files.read_bytes(Path(name), MAX_FILE_BYTES, KIND)
    size = int.from_bytes(data[:LENGTH], "little")
    try:
        header = json.loads(data[LENGTH : LENGTH + size])
        known = {key: header["__metadata__"][key] for key in HEADER}
        found = {
            layer: _factors(data[LENGTH + size :], entry)
            for layer, entry in header.items()
            if layer != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        known = {}
    if known != HEADER:
        raise ConfigError(
            f"smoothing {os.fspath(path)!r} is not a file of schema version {SCHEMA_VERSION} that "
            "`sage policy smoothing` wrote; write one from captures of linears"
        )
    equal: dict[bytes, torch.Tensor] = {}
    for layer, one in found.items():
        if not ((one > 0) & one.isfinite()).all():
            raise ConfigError(
                f"smoothing {os.fspath(path)!r}: {layer} has factors that are not above 0 and "
                "finite"
            )
        found[layer] = equal.setdefault(one.numpy().tobytes(), one)
    return Smoothing(name, found)


def _factors(data: bytes, entry: dict[str, Any]) -> torch.Tensor:
    """The tensor of an entry of the header.

    Raises:
        ValueError: it is not one of fp32 factors, or not in the file.
    """
    (channels,), (begin, end) = entry["shape"], entry["data_offsets"]
    if entry["dtype"] != "F32" or not 0 <= begin < end <= len(data) or end - begin != 4 * channels:
        raise ValueError("not a tensor of factors")
    return torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32)
