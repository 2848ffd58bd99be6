"""Sensitivity of a clip to each layer and step range; the file that holds it.

An error of attention is not yet an error of the clip: `sage policy sensitivity` draws a clip with
one layer at a time on a kernel, in one range of steps, and writes how far it is from the baseline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from sage_plugin import files
from sage_plugin.errors import ConfigError
from sage_plugin.schema import JsonRecord

SCHEMA_VERSION = 1
MAX_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Sensitivity(JsonRecord):
    """One layer in one step range.

    Attributes:
        layer: module path, with the component in front.
        steps: the range as a policy writes it.
        rmse: root mean square difference of the clip from the baseline's, of pixels in [0, 1].
    """

    layer: str
    steps: str
    rmse: float


@dataclass(frozen=True, slots=True)
class Sensitivities(JsonRecord):
    """A file of sensitivities.

    Attributes:
        schema_version: `SCHEMA_VERSION` of the writer.
        kernel: the option that they were measured with, as `sage tune --kernel` names it.
        cells: one per layer and step range.
    """

    schema_version: int
    kernel: str
    cells: tuple[Sensitivity, ...]


def read(path: Path) -> Sensitivities:
    """Read a file of sensitivities.

    Raises:
        ConfigError: it cannot be read, or is not a sound file of sensitivities.
    """
    data = files.read_json(path, MAX_BYTES, "file of sensitivities")
    try:
        found = Sensitivities.from_json(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if found.schema_version != SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: schema version {found.schema_version}; this release reads {SCHEMA_VERSION}"
        )
    if not found.cells or any(not 0 <= one.rmse < math.inf for one in found.cells):
        raise ConfigError(f"{path}: needs cells, each with an rmse of 0 or more")
    return found
