"""Sensitivity of a clip to each layer and step range; the file that holds it.

An error of a call is not yet an error of the clip: `sage policy sensitivity` draws a clip with
one layer at a time on a kernel, in one range of steps, and writes how far it is from the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sage_plugin import files
from sage_plugin.errors import ConfigError
from sage_plugin.plugin.context import layer_form
from sage_plugin.schema import JsonRecord
from sage_plugin.tune.policy.grid import PolicyCell

SCHEMA_VERSION = 1
MAX_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Sensitivity(JsonRecord):
    """One layer in one step range.

    Attributes:
        layer: module path, with the component in front.
        steps: the range as a policy writes it.
        rmse: root mean square difference of the clip from the baseline's, of pixels in [0, 1].
        kernel: the option that it was measured with; empty for the file's.
    """

    layer: str
    steps: str
    rmse: float
    kernel: str = ""


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


def weighted(
    measured: Sensitivities, cells: Sequence[PolicyCell], where: str
) -> tuple[PolicyCell, ...]:
    """Weigh each cell by how much a unit of error in its calls moves the clip.

    Raises:
        ConfigError: a cell has none: they were measured on other layers or step ranges.
    """
    known = {(one.layer, one.steps): one for one in measured.cells}
    raw = []
    for cell in cells:
        one = known.get((cell.layer, cell.steps))
        if one is None:
            alike = {steps for layer, steps in known if layer_form(layer) == layer_form(cell.layer)}
            if not alike:
                raise ConfigError(
                    f"{where}: no sensitivity to {cell.layer} or any like it: measure it with a "
                    "kernel of each op family, such as --kernel fav3_fp8 --kernel fp8_row"
                )
            ranges = len(alike)
            raise ConfigError(
                f"{where}: no sensitivity to {cell.layer} at steps {cell.steps or 'all'}; it was "
                f"measured in {ranges} ranges: search with --step-ranges {ranges}, on the same "
                "model"
            )
        error = cell.of(one.kernel or measured.kernel).error * cell.calls_per_run
        raw.append(one.rmse / error if error > 0 else math.nan)
    usual = [value for value in raw if not math.isnan(value)]
    if not usual:
        raise ConfigError(
            f"{where}: measured with {measured.kernel}, which no layer may run here or nobody "
            f"asked for: add --kernel {measured.kernel}, or measure with another kernel"
        )
    # A cell where that option may not run is as sensitive as the most sensitive one.
    full = [max(usual) if math.isnan(value) else value for value in raw]
    calls = [cell.calls_per_run for cell in cells]
    mean = math.fsum(w * n for w, n in zip(full, calls, strict=True)) / math.fsum(calls)
    return tuple(
        replace(cell, weight=weight / mean if mean > 0 else 1.0)
        for cell, weight in zip(cells, full, strict=True)
    )
