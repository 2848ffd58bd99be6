"""Files of best configs as an earlier tuner of INT8 attention wrote them, and back.

`best_configs_B1_H5_S8192_16384_D128_20260101_120000.json` holds, by sequence length, a config of
five fields with its time. Such a file knows neither dtype nor errors, so that what it says is
measured anew before it becomes an entry (`sage configs import`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_plugin import files
from sage_plugin.errors import ConfigError
from sage_plugin.schema import AnyEntry, RegistryEntry

KERNEL = "sage"
FIELDS = {
    "BLOCK_SIZE_M": "block_m",
    "BLOCK_SIZE_N": "block_n",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
    "waves_per_eu": "waves_per_eu",
}
"""The fields of such a config, by our names."""
IGNORED = ("stage",)
"""Fields that no kernel reads."""
MAX_FILE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class BestConfig:
    """One row of such a file: self-attention of a length, and the fields of its config.

    Attributes:
        seq_len: queries and keys.
        batch: batch items.
        heads: heads of queries and keys.
        head_dim: channels of a head.
        fields: fields of `LaunchConfig` with their values.
        time_ms: what it took there.
    """

    seq_len: int
    batch: int
    heads: int
    head_dim: int
    fields: dict[str, int]
    time_ms: float


def read(path: Path) -> list[BestConfig]:
    """Read the rows of a file."""
    data = files.read_json(path, MAX_FILE_BYTES, "file of best configs")
    if not isinstance(data, dict) or not data:
        raise ConfigError(f"{path}: expected an object of configs by sequence length")
    return [_row(f"{path}: {length!r}", length, row) for length, row in data.items()]


def write(
    entries: Iterable[AnyEntry], stamp: str
) -> tuple[dict[str, dict[str, Any]], list[AnyEntry]]:
    """Make files of entries, one for each number of heads and channels.

    Args:
        entries: tuned configs of any kernel.
        stamp: date and time for the names, as `20260101_120000`.

    Returns:
        Contents by name, and the entries that such files have no words for: other kernels, masks,
        causal and grouped calls. Where several entries differ in dtype or layout alone, the one of
        captures stands, then the fastest.
    """
    groups: defaultdict[tuple[int, int], dict[int, RegistryEntry]] = defaultdict(dict)
    left_out: list[AnyEntry] = []
    for entry in sorted(entries, key=lambda e: (e.evidence.synthetic, e.evidence.time.median_ms)):
        if not isinstance(entry, RegistryEntry) or not _has_words(entry):
            left_out.append(entry)
            continue
        key = entry.key
        groups[key.batch_heads, key.head_dim].setdefault(key.seq_q, entry)
    return {
        _name(heads, head_dim, sorted(rows), stamp): {
            f"{seq}": _of_entry(rows[seq], heads, head_dim) for seq in sorted(rows)
        }
        for (heads, head_dim), rows in sorted(groups.items())
    }, left_out


def _has_words(entry: RegistryEntry) -> bool:
    """Whether such files can tell of the call of an entry."""
    key = entry.key
    plain = key.kernel == KERNEL and not key.causal and key.mask_kind == "none"
    return plain and key.gqa_ratio == 1 and key.seq_q == key.seq_k


def _name(heads: int, head_dim: int, lengths: list[int], stamp: str) -> str:
    return f"best_configs_B1_H{heads}_S{'_'.join(map(str, lengths))}_D{head_dim}_{stamp}.json"


def _of_entry(entry: RegistryEntry, heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "config": {theirs: getattr(entry.config, ours) for theirs, ours in FIELDS.items()},
        "time_ms": entry.evidence.time.median_ms,
        "batch_size": 1,
        "num_heads": heads,
        "head_dim": head_dim,
    }


def _row(where: str, length: str, row: object) -> BestConfig:
    if not isinstance(row, dict) or not isinstance(row.get("config"), dict):
        raise ConfigError(f"{where}: expected an object with a config")
    if not (length.isascii() and length.isdigit() and int(length)):
        raise ConfigError(f"{where}: expected a sequence length")
    sizes = [_number(where, row, name) for name in ("batch_size", "num_heads", "head_dim")]
    time_ms = row.get("time_ms")
    if not isinstance(time_ms, int | float) or isinstance(time_ms, bool) or not time_ms > 0:
        raise ConfigError(f"{where}: time_ms is {time_ms!r}, expected a positive number")
    batch, heads, head_dim = sizes
    return BestConfig(
        int(length), batch, heads, head_dim, _fields(where, row["config"]), float(time_ms)
    )


def _fields(where: str, config: Mapping[str, Any]) -> dict[str, int]:
    known = {name.lower(): ours for name, ours in FIELDS.items()}
    found = {}
    for name, value in config.items():
        if name.lower() in IGNORED:
            continue
        if name.lower() not in known:
            raise ConfigError(f"{where}: unknown field {name!r}; known are {', '.join(FIELDS)}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{where}: {name} is {value!r}, expected a whole number")
        found[known[name.lower()]] = value
    return found


def _number(where: str, row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{where}: {name} is {value!r}, expected at least 1")
    return value
