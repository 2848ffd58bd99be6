"""Plain statistics of two outputs and of their difference, for `--print-compare-stats`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sage_plugin.schema import JsonRecord

GOOD_COSINE = 0.99
UPSTREAM_ABS = 0.3
UPSTREAM_REL = 0.25


@dataclass(frozen=True, slots=True)
class Spread(JsonRecord):
    """Smallest, largest, mean and standard deviation of a tensor's finite values."""

    min: float
    max: float
    mean: float
    std: float
    bad_values: int


@dataclass(frozen=True, slots=True)
class OutputDifference(JsonRecord):
    """How a test output differs from a reference, on the same rows.

    `upstream_fails` is the share of values with an absolute error above 0.3 and a relative one
    above 0.25, the rule of the kernels that these descend from, too loose to be a gate;
    `rows_above` is the share of rows with a cosine above 0.99.
    """

    shape: tuple[int, ...]
    reference: Spread
    test: Spread
    abs_error: Spread
    cosine: float
    row_cosine_mean: float
    row_cosine_median: float
    row_cosine_p10: float
    rows_above: float
    upstream_fails: float


def difference(test: torch.Tensor, reference: torch.Tensor) -> OutputDifference:
    """Compare two outputs (B, H, R, Dv) value by value."""
    t, r = _finite(test), _finite(reference)
    error = (t - r).abs()
    rows = torch.nn.functional.cosine_similarity(t, r, dim=-1).flatten()
    beyond = (error > UPSTREAM_ABS) & (error > UPSTREAM_REL * r.abs())
    return OutputDifference(
        shape=tuple(test.shape),
        reference=_spread(reference),
        test=_spread(test),
        abs_error=_spread(error),
        cosine=torch.nn.functional.cosine_similarity(t.flatten(), r.flatten(), dim=0).item(),
        row_cosine_mean=rows.mean().item(),
        row_cosine_median=rows.median().item(),
        row_cosine_p10=rows.kthvalue(max(1, -(-rows.numel() // 10))).values.item(),
        rows_above=(rows > GOOD_COSINE).double().mean().item(),
        upstream_fails=beyond.double().mean().item(),
    )


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(tensor.double(), nan=0.0, posinf=0.0, neginf=0.0)


def _spread(tensor: torch.Tensor) -> Spread:
    values = _finite(tensor)
    return Spread(
        min=values.min().item(),
        max=values.max().item(),
        mean=values.mean().item(),
        std=values.std(correction=0).item(),
        bad_values=int((~torch.isfinite(tensor)).sum().item()),
    )
