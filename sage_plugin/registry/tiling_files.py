"""Files of tilings of grouped products as an earlier tuner wrote them, and back.

`m4096_k2048_n1536_g128.json` holds the tile (m, k, n) that was the fastest for so many rows,
channels and groups, with its time. It knows neither dtype nor errors, so that what it says is
measured anew before it becomes an entry (`sage configs import`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_plugin import files
from sage_plugin.errors import ConfigError
from sage_plugin.schema import GROUPED_LINEAR, AnyEntry, LinearEntry

NAME = re.compile(r"m(\d{1,9})_k(\d{1,9})_n(\d{1,9})_g(\d{1,9})\.json")
MAX_FILE_BYTES = 2**16
LARGEST = {"block_m": 128, "block_k": 128, "block_n": 256}
SMALLEST = {"block_m": 16, "block_k": 32, "block_n": 32}
"""Tiles of that tuner go up to 2,048; they are cut to what registers hold here."""


@dataclass(frozen=True, slots=True)
class GroupedTiling:
    """What one file says.

    Attributes:
        rows: rows of the input, m.
        in_features: channels of it, k; out_features of the output, n.
        groups: weights, g.
        fields: fields of `LinearLaunch` with their values.
        time_ms: what it took there.
    """

    rows: int
    in_features: int
    out_features: int
    groups: int
    fields: dict[str, int]
    time_ms: float


def is_tiling(path: Path) -> bool:
    """Return whether a file is named as those are.

    Example:
        >>> is_tiling(Path("tuning_cache/m512_k64_n96_g8.json"))
        True
    """
    return NAME.fullmatch(path.name) is not None


def read(path: Path) -> GroupedTiling:
    """Read one file.

    Raises:
        ConfigError: it is missing, not strict JSON, not of that form, or not named so.
    """
    named = NAME.fullmatch(path.name)
    if named is None:
        raise ConfigError(f"{path}: expected a name such as m4096_k2048_n1536_g128.json")
    data = files.read_json(path, MAX_FILE_BYTES, "tiling")
    sizes = data.get("optimal_tiling") if isinstance(data, dict) else None
    if not isinstance(sizes, list) or len(sizes) != len(LARGEST) or not all(map(_is_size, sizes)):
        raise ConfigError(f"{path}: optimal_tiling is {sizes!r}, expected three sizes (m, k, n)")
    time_ms = data.get("best_time_ms")
    if not isinstance(time_ms, int | float) or isinstance(time_ms, bool) or not time_ms > 0:
        raise ConfigError(f"{path}: best_time_ms is {time_ms!r}, expected a positive number")
    fields = {
        name: _fitting(size, SMALLEST[name], LARGEST[name])
        for name, size in zip(LARGEST, sizes, strict=True)
    }
    m, k, n, g = map(int, named.groups())
    return GroupedTiling(m, k, n, g, fields, float(time_ms))


def write(
    entries: Iterable[AnyEntry], stamp: str
) -> tuple[dict[str, dict[str, Any]], list[AnyEntry]]:
    """Make files of entries, one each.

    Args:
        entries: tuned configs of any family.
        stamp: date and time.

    Returns:
        Contents by name, and the entries that such files have no words for. Where several differ in
        kernel or dtype alone, the fastest stands.
    """
    made: dict[str, dict[str, Any]] = {}
    left_out: list[AnyEntry] = []
    for entry in sorted(entries, key=lambda one: one.evidence.time.median_ms):
        if not isinstance(entry, LinearEntry) or entry.key.family != GROUPED_LINEAR:
            left_out.append(entry)
            continue
        key, config = entry.key, entry.config
        name = f"m{key.rows}_k{key.in_features}_n{key.out_features}_g{key.groups}.json"
        made.setdefault(
            name,
            {
                "optimal_tiling": [config.block_m, config.block_k, config.block_n],
                "best_time_ms": entry.evidence.time.median_ms,
                "timestamp": stamp,
            },
        )
    return made, left_out


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _fitting(size: int, smallest: int, largest: int) -> int:
    """The power of two at or under a size, within limits."""
    return max(smallest, min(largest, 1 << (size.bit_length() - 1)))
