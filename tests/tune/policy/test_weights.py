"""Weights of cells from what the clip feels."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_plugin.errors import ConfigError
from sage_plugin.tune.policy.estimates import CellEstimates, Estimate
from sage_plugin.tune.policy.sensitivity_file import Sensitivities, Sensitivity
from sage_plugin.tune.policy.weights import weights_of
from tests.tune.policy import recordings

BANDS = ("0:1", "1:4")


def cells_of(errors):
    """Two bands of one call and of three; `None` where the kernel may not run."""
    grid = recordings.grid(len(errors) // 2, BANDS, 4)
    host = Estimate("sdpa", 0.0, 4.0)
    return [
        CellEstimates(place, cell, (host,) if e is None else (host, Estimate("sage", e, 1.0)))
        for (place, cell), e in zip(grid.cells.items(), errors, strict=True)
    ]


def effects_of(cells, rmse):
    rows = (Sensitivity(c.cell.layer, c.cell.band, r) for c, r in zip(cells, rmse, strict=True))
    return Sensitivities(1, "sage", tuple(rows))


@settings(deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.floats(1e-4, 0.2), st.floats(1e-4, 1.0)), min_size=2, max_size=8
    ).filter(lambda rows: len(rows) % 2 == 0)
)
def test_the_mean_over_calls_is_one_and_ratios_are_those_of_the_clip(rows):
    cells = cells_of([error for error, _ in rows])
    found = weights_of(effects_of(cells, [rmse for _, rmse in rows]), cells, "e")
    calls = [one.cell.weight for one in cells]
    assert sum(w * n for w, n in zip(found, calls, strict=True)) == pytest.approx(sum(calls))
    per_error = [rmse / (e * n) for (e, rmse), n in zip(rows, calls, strict=True)]
    for weight, value in zip(found, per_error, strict=True):
        assert weight / found[0] == pytest.approx(value / per_error[0])


def test_where_the_kernel_may_not_run_a_cell_is_as_sensitive_as_the_worst():
    cells = cells_of([0.1, None, 0.1, 0.1])
    found = weights_of(effects_of(cells, [0.3, 0.0, 0.1, 0.1]), cells, "e")
    assert found[1] == max(found) == found[0]
    assert found[2] == pytest.approx(found[0] / 3)


def test_a_clip_that_feels_nothing_weighs_all_alike():
    cells = cells_of([0.1, 0.1])
    assert weights_of(effects_of(cells, [0.0, 0.0]), cells, "e") == (1.0, 1.0)


def test_other_bands_and_a_kernel_that_runs_nowhere_are_refused():
    cells = cells_of([0.1, 0.1])
    with pytest.raises(ConfigError, match=r"e: no sensitivity to .* at steps 1:4.*--step-ranges 1"):
        weights_of(effects_of(cells[:1], [0.1]), cells, "e")
    none = cells_of([None, None])
    with pytest.raises(ConfigError, match="measured with sage, which no layer may run"):
        weights_of(effects_of(none, [0.1, 0.1]), none, "e")
