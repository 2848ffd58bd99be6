"""Grouped linears to compute, and what they are by their definition in fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

GROUPS, CHANNELS, COLUMNS = 5, 48, 40


@dataclass(frozen=True)
class Case:
    """How rows are spread over groups.

    Attributes:
        sizes: rows of each group as the caller gives them.
        rows: rows of the input.
        used: rows that belong to a group.
    """

    sizes: tuple[int, ...]
    rows: int
    used: int


CASES = {
    "spread": Case((5, 0, 17, 1, 9), 32, 32),
    "rows beyond": Case((5, 0, 17, 1, 9), 37, 32),
    "one row": Case((0, 0, 1, 0, 0), 1, 1),
    "skewed": Case((0, 40, 0, 1, 0), 41, 41),
    "no rows": Case((0, 0, 0, 0, 0), 7, 0),
    "sizes past the end": Case((3, 4, 100, 5, 2), 20, 20),
    "sizes under 0": Case((3, -4, 6, 0, 2), 15, 11),
}


def drawn(case: Case, dtype: torch.dtype = torch.bfloat16, seed: int = 0):
    """Input whose rows beyond the groups are NaN, weights, sizes and bias."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x = draw(case.rows, CHANNELS).to(dtype)
    x[case.used :] = math.nan
    weights = (draw(GROUPS, COLUMNS, CHANNELS) * CHANNELS**-0.5).to(dtype)
    sizes = torch.tensor(case.sizes, dtype=torch.int32)
    return x, weights, sizes, draw(GROUPS, COLUMNS).to(dtype)


def exact(x, weights, sizes, bias=None) -> torch.Tensor:
    """What each row gives with the weight of its group, in fp64; 0 beyond them."""
    out = torch.zeros(x.shape[0], weights.shape[1], dtype=torch.float64)
    begin = 0
    for group, size in enumerate(sizes.tolist()):
        end = min(begin + max(0, size), x.shape[0])
        out[begin:end] = x[begin:end].double() @ weights[group].double().t()
        if bias is not None:
            out[begin:end] += bias[group].double()
        begin = end
    return out


def loss(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error, 0 of nothing."""
    return float((out.double() - reference).norm() / reference.norm().clamp_min(1e-9))
