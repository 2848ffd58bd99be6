"""Weights of cells, from the sensitivity of a clip to each layer and step range."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sage_plugin.errors import ConfigError
from sage_plugin.tune.policy.estimates import CellEstimates
from sage_plugin.tune.policy.sensitivity_file import Sensitivities


def weights_of(
    measured: Sensitivities, cells: Sequence[CellEstimates], where: str
) -> tuple[float, ...]:
    """How much a unit of attention error in a cell's calls moves the clip; their mean is 1.

    Args:
        measured: the sensitivities.
        cells: the cells, with estimates of the option that they were measured with.
        where: what the error names.

    Returns:
        One weight a cell, in their order; the mean over all calls of the cells is 1.

    Raises:
        ConfigError: a cell has none: they were measured on other layers or ranges.
    """
    known = {(one.layer, one.steps): one.rmse for one in measured.cells}
    raw = []
    for one in cells:
        rmse = known.get((one.cell.layer, one.cell.band))
        if rmse is None:
            ranges = len({steps for _, steps in known})
            raise ConfigError(
                f"{where}: no sensitivity to {one.cell.layer} at steps {one.cell.band or 'all'}; "
                f"it was measured in {ranges} ranges: search with --step-ranges {ranges}, on "
                "the same model"
            )
        error = one.of(measured.kernel).error * one.cell.weight
        raw.append(rmse / error if error > 0 else math.nan)
    usual = [value for value in raw if not math.isnan(value)]
    if not usual:
        raise ConfigError(
            f"{where}: measured with {measured.kernel}, which no layer may run here or nobody "
            f"asked for: add --kernel {measured.kernel}, or measure with another kernel"
        )
    # A cell where that option may not run is as sensitive as the most sensitive one.
    full = [max(usual) if math.isnan(value) else value for value in raw]
    calls = math.fsum(one.cell.weight for one in cells)
    mean = math.fsum(w * one.cell.weight for w, one in zip(full, cells, strict=True)) / calls
    return tuple(weight / mean if mean > 0 else 1.0 for weight in full)
