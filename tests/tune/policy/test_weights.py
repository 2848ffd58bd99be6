"""Weights of cells from the sensitivity of the clip."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_plugin.errors import ConfigError
from sage_plugin.tune.policy.grid import Estimate
from sage_plugin.tune.policy.sensitivity_file import Sensitivities, Sensitivity, weighted
from tests.tune.policy import recordings

BANDS = ("0:1", "1:4")


def cells_of(errors):
    """Two bands of one call and of three; `None` where the kernel may not run."""
    grid = recordings.grid(len(errors) // 2, BANDS, 4)
    host = Estimate("sdpa", 0.0, 4.0)
    return [
        dataclasses.replace(
            cell, estimates=(host,) if e is None else (host, Estimate("sage", e, 1.0))
        )
        for cell, e in zip(grid.cells.values(), errors, strict=True)
    ]


def weights_of(cells, rmse):
    """Weights from the sensitivity of each cell, measured with `sage`."""
    rows = (Sensitivity(c.layer, c.steps, r) for c, r in zip(cells, rmse, strict=False))
    return tuple(c.weight for c in weighted(Sensitivities(1, "sage", tuple(rows)), cells, "e"))


@given(
    rows=st.lists(
        st.tuples(st.floats(1e-4, 0.2), st.floats(1e-4, 1.0)), min_size=2, max_size=8
    ).filter(lambda rows: len(rows) % 2 == 0)
)
def test_the_mean_over_calls_is_one_and_ratios_are_those_of_the_clip(rows):
    cells = cells_of([error for error, _ in rows])
    found = weights_of(cells, [rmse for _, rmse in rows])
    calls = [one.calls_per_run for one in cells]
    assert sum(w * n for w, n in zip(found, calls, strict=True)) == pytest.approx(sum(calls))
    per_error = [rmse / (e * n) for (e, rmse), n in zip(rows, calls, strict=True)]
    for weight, value in zip(found, per_error, strict=True):
        assert weight / found[0] == pytest.approx(value / per_error[0])


def test_where_the_kernel_may_not_run_a_cell_is_as_sensitive_as_the_worst():
    cells = cells_of([0.1, None, 0.1, 0.1])
    found = weights_of(cells, [0.3, 0.0, 0.1, 0.1])
    assert found[1] == max(found) == found[0]
    assert found[2] == pytest.approx(found[0] / 3)


def test_a_clip_that_loses_nothing_weighs_all_alike():
    cells = cells_of([0.1, 0.1])
    assert weights_of(cells, [0.0, 0.0]) == (1.0, 1.0)


def test_other_bands_and_a_kernel_that_runs_nowhere_are_refused():
    cells = cells_of([0.1, 0.1])
    with pytest.raises(ConfigError, match=r"e: no sensitivity to .* at steps 1:4.*--step-ranges 1"):
        weights_of(cells, [0.1])
    none = cells_of([None, None])
    with pytest.raises(ConfigError, match="measured with sage, which no layer may run"):
        weights_of(none, [0.1, 0.1])
