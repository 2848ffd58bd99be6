"""A search space given by the user: a JSON object of lists, whose product is searched.

Keys are fields of the family's launch configs, or the older spelling `block_size_m` and
`block_size_n`. A field without a list keeps the default's value.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

from sage_plugin import files
from sage_plugin.errors import ConfigError
from sage_plugin.paged_records import PAGED_ATTENTION, PagedLaunch
from sage_plugin.registry import load
from sage_plugin.schema import (
    ATTENTION,
    GROUPED_LINEAR,
    LINEAR,
    AnyLaunch,
    LaunchConfig,
    LinearLaunch,
)

MAX_CONFIGS = 100_000
MAX_FILE_BYTES = 2**20
RENAMED = {"block_size_m": "block_m", "block_size_n": "block_n"}
RECORDS: dict[str, type[AnyLaunch]] = {
    ATTENTION: LaunchConfig,
    LINEAR: LinearLaunch,
    GROUPED_LINEAR: LinearLaunch,
    PAGED_ATTENTION: PagedLaunch,
}
"""The record of a launch config by its family."""
IGNORED = {"stage": "no kernel reads it"}

Value = int | bool | str


@dataclass(frozen=True, slots=True)
class SpaceFile:
    """Values to search by field, in the order of the file.

    Attributes:
        path: where it was read from.
        axes: pairs of field and values.
        notes: sentences on keys that were ignored.
    """

    path: Path
    axes: tuple[tuple[str, tuple[Value, ...]], ...]
    notes: tuple[str, ...] = ()

    def configs(self, default: AnyLaunch) -> list[AnyLaunch]:
        """List the default, then every other combination."""
        names = [name for name, _ in self.axes]
        combinations = itertools.product(*(values for _, values in self.axes))
        found = (default.replaced(**dict(zip(names, c, strict=True))) for c in combinations)
        return list(dict.fromkeys((default, *found)))


def read(path: str | Path, family: str = ATTENTION) -> SpaceFile:
    """Read a search space; the name of one that comes with the package will do."""
    path = Path(path)
    if not path.exists() and (shipped := load.shipped_dir()) is not None:
        ready = shipped / load.SPACES / path.name
        path = ready if path.parent == Path() and ready.exists() else path
    data = files.read_json(path, MAX_FILE_BYTES, "search space")
    if not isinstance(data, dict) or not data:
        raise ConfigError(f'{path}: expected an object of lists, such as {{"block_n": [64, 128]}}')
    axes: dict[str, tuple[Value, ...]] = {}
    notes = []
    for key, values in data.items():
        if key.lower() in IGNORED:
            notes.append(f"{path}: {key!r} is ignored: {IGNORED[key.lower()]}")
            continue
        name = _field(path, key, RECORDS[family])
        if name in axes:
            raise ConfigError(f"{path}: {key!r} names {name} a second time")
        axes[name] = _values(path, key, RECORDS[family].__annotations__[name], values)
    if (count := math.prod(map(len, axes.values()))) > MAX_CONFIGS:
        raise ConfigError(f"{path}: {count} combinations, at most {MAX_CONFIGS}; shorten its lists")
    return SpaceFile(path, tuple(axes.items()), tuple(notes))


def _field(path: Path, key: str, record: type[AnyLaunch]) -> str:
    name = RENAMED.get(key.lower(), key.lower())
    fields = [field.name for field in dataclasses.fields(record)]
    if name not in fields:
        raise ConfigError(f"{path}: unknown field {key!r}; allowed: {', '.join(fields)}")
    return name


def _values(path: Path, key: str, kind: object, values: object) -> tuple[Value, ...]:
    wanted = {"int": int, "bool": bool, "str": str}[str(kind)]
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{path}: {key!r} is {values!r}, expected a list with at least one value")
    for value in values:
        if type(value) is not wanted:
            raise ConfigError(f"{path}: {key!r} holds {value!r}, expected {wanted.__name__}")
    return tuple(dict.fromkeys(values))
