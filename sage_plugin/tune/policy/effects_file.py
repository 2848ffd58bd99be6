"""What a clip feels of each layer and step, measured on whole clips; the file that holds it.

An error of attention is not yet an error of the clip: `sage policy sensitivity` draws a clip with
one layer at a time on a kernel, in one band of steps, and writes how far it lies from the host's.
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
class Effect(JsonRecord):
    """One layer in one band.

    Attributes:
        layer: module path, with the component in front.
        steps: the band as a policy writes it.
        rmse: root mean square difference of the clip from the host's, of pixels in [0, 1].
    """

    layer: str
    steps: str
    rmse: float


@dataclass(frozen=True, slots=True)
class Effects(JsonRecord):
    """A file of effects.

    Attributes:
        schema_version: `SCHEMA_VERSION` of the writer.
        kernel: the option that they were measured with, as `sage tune --kernel` names it.
        effects: one a layer and band.
    """

    schema_version: int
    kernel: str
    effects: tuple[Effect, ...]


def read(path: Path) -> Effects:
    """Read a file of effects.

    Raises:
        ConfigError: it cannot be read, or is no sound file of effects.
    """
    data = files.read_json(path, MAX_BYTES, "file of effects")
    try:
        effects = Effects.from_json(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if effects.schema_version != SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: schema version {effects.schema_version}; this release reads {SCHEMA_VERSION}"
        )
    if not effects.effects or any(not 0 <= one.rmse < math.inf for one in effects.effects):
        raise ConfigError(f"{path}: needs effects, each with an rmse of 0 or more")
    return effects
