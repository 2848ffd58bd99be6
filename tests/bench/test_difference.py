"""Statistics of two outputs, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from sage_plugin.bench.difference import OutputDifference, difference


def test_by_hand():
    exact = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    test = torch.tensor([[[[1.0, 3.0], [3.0, math.nan]]]])
    found = difference(test, exact)
    assert found.shape == (1, 1, 2, 2)
    assert (found.reference.min, found.reference.max, found.reference.mean) == (1.0, 4.0, 2.5)
    assert found.reference.std == pytest.approx(math.sqrt(1.25))
    assert found.test.bad_values == 1
    assert found.abs_error.max == 4.0
    assert found.abs_error.mean == pytest.approx(5 / 4)
    assert found.upstream_fails == pytest.approx(2 / 4)
    assert found.rows_above == 0.0
    assert found.row_cosine_p10 == pytest.approx(3 / 5)
    assert OutputDifference.from_json(found.to_json()) == found


def test_equal_outputs():
    exact = torch.randn(2, 2, 5, 8)
    found = difference(exact, exact)
    assert found.cosine == pytest.approx(1.0)
    assert (found.rows_above, found.upstream_fails, found.abs_error.max) == (1.0, 0.0, 0.0)
