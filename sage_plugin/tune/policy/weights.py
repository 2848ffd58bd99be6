"""Weights of cells, from what a clip feels of each layer and step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sage_plugin.errors import ConfigError
from sage_plugin.tune.policy.effects_file import Effects
from sage_plugin.tune.policy.estimates import CellEstimates


def weights_of(effects: Effects, cells: Sequence[CellEstimates], where: str) -> tuple[float, ...]:
    """How much a unit of attention error in a cell's calls moves the clip; their mean is 1.

    Args:
        effects: what was measured.
        cells: the cells, with estimates of the option that the effects were measured with.
        where: what the error names.

    Returns:
        One weight a cell, in their order; the mean over all calls of the cells is 1.

    Raises:
        ConfigError: a cell has no effect: they were measured on other layers or bands.
    """
    known = {(one.layer, one.steps): one.rmse for one in effects.effects}
    raw = []
    for one in cells:
        rmse = known.get((one.cell.layer, one.cell.band))
        if rmse is None:
            bands = len({steps for _, steps in known})
            raise ConfigError(
                f"{where}: no effect of {one.cell.layer} at steps {one.cell.band or 'all'}; these "
                f"were measured in {bands} bands: search with --bands {bands}, on the same model"
            )
        error = one.of(effects.kernel).error * one.cell.weight
        raw.append(rmse / error if error > 0 else math.nan)
    usual = [value for value in raw if not math.isnan(value)]
    if not usual:
        raise ConfigError(
            f"{where}: measured with {effects.kernel}, which no layer may run here or nobody asked "
            f"for: add --kernel {effects.kernel}, or measure with another kernel"
        )
    # A cell where that option may not run is as sensitive as the most sensitive one.
    full = [max(usual) if math.isnan(value) else value for value in raw]
    calls = math.fsum(one.cell.weight for one in cells)
    mean = math.fsum(w * one.cell.weight for w, one in zip(full, cells, strict=True)) / calls
    return tuple(weight / mean if mean > 0 else 1.0 for weight in full)
