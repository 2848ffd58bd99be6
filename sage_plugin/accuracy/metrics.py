"""Error of an output against a reference, head by head in fp64."""

from __future__ import annotations

import math

import torch

from sage_plugin.accuracy.output import CheckedOutput, ExactRows
from sage_plugin.schema import ErrorMetrics

TINY = 1e-30
"""Stands for a reference that sums to zero, so that every metric stays a finite number."""


def compare(
    out: torch.Tensor,
    reference: torch.Tensor,
    *,
    v_mean: torch.Tensor | None = None,
    rounding: torch.dtype | None = None,
    bad_values: int | None = None,
    suspect: str = "",
) -> ErrorMetrics:
    """Judge an output, or sampled rows of it.

    NaN and infinite values are counted and enter the other metrics as zero, so that those stay
    finite numbers that JSON can hold.

    Args:
        out: (B, H, R, Dv), fp32 where the centred error is to mean anything.
        reference: the same rows, exact.
        v_mean: mean of V over the visible keys, broadcast to `out`; zero where `None`.
        rounding: dtype whose rounding floor is reported; that of `out` where `None`.
        bad_values: count over the whole output, where `out` is a sample of it.
        suspect: goes into the result as it is.

    Returns:
        Sums and percentiles over all heads, and the worst head's where the name says so.

    Example:
        >>> exact = torch.tensor([[[[1.0, 1.0]]]])
        >>> metrics = compare(exact * 0.5, exact)
        >>> metrics.rel_l1, metrics.gain, round(metrics.cosine, 6)
        (0.5, 0.5, 1.0)
    """
    if out.shape != reference.shape:
        raise ValueError(f"compare: got {tuple(out.shape)} and {tuple(reference.shape)}")
    batch, heads = out.shape[:2]
    mean = torch.zeros((), device=out.device) if v_mean is None else v_mean
    mean = mean.expand(batch, heads, *out.shape[2:])
    dtype = rounding or out.dtype
    sums, cosines = [], []
    for b in range(batch):
        for h in range(heads):
            head_sums, head_cosines = _head(out[b, h], reference[b, h], mean[b, h], dtype)
            sums.append(head_sums)
            cosines.append(head_cosines)
    found = int((~torch.isfinite(out)).sum().item())
    return _combined(
        torch.stack(sums).cpu(),
        torch.stack(cosines).cpu(),
        count=out.numel(),
        bad_values=found if bad_values is None else bad_values,
        suspect=suspect,
    )


def _head(
    out: torch.Tensor, exact: torch.Tensor, mean: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Nine sums of one head, and the cosine of each of its rows."""
    o = torch.nan_to_num(out.double(), nan=0.0, posinf=0.0, neginf=0.0)
    r = exact.double()
    error = o - r
    dot, oo, rr = (o * r).sum(-1), (o * o).sum(-1), (r * r).sum(-1)
    rounded = (exact.to(dtype).double() - r).abs().sum()
    sums = [
        error.abs().sum(),
        r.abs().sum(),
        (error * error).sum(),
        error.abs().amax(),
        dot.sum(),
        oo.sum(),
        rr.sum(),
        o.sum(),
        r.sum(),
        (r - mean.double()).abs().sum(),
        rounded,
    ]
    return torch.stack(sums), _cosine(dot, oo, rr)


def _cosine(dot: torch.Tensor, oo: torch.Tensor, rr: torch.Tensor) -> torch.Tensor:
    """Cosine, where two zero vectors agree and a zero one agrees with no other."""
    norm = (oo * rr).sqrt()
    both_zero = ((oo == 0) & (rr == 0)).to(dot.dtype)
    return torch.where(norm > 0, dot / norm.clamp_min(TINY), both_zero)


def _combined(
    sums: torch.Tensor, cosines: torch.Tensor, *, count: int, bad_values: int, suspect: str
) -> ErrorMetrics:
    total = sums.sum(0)
    error, size, square, _, dot, oo, rr, out_sum, ref_sum, centered_size, rounded = total.tolist()
    head_cosines = _cosine(sums[:, 4], sums[:, 5], sums[:, 6])
    head_rel_l1 = sums[:, 0] / sums[:, 1].clamp_min(TINY)
    head_centered = sums[:, 0] / sums[:, 9].clamp_min(TINY)
    return ErrorMetrics(
        rel_l1=error / max(size, TINY),
        cosine=_cosine(*(torch.tensor(x, dtype=torch.float64) for x in (dot, oo, rr))).item(),
        rmse=math.sqrt(square / max(count, 1)),
        max_abs=sums[:, 3].max().item(),
        row_cosine_p10=_p10(cosines.flatten()),
        worst_head_rel_l1=head_rel_l1.max().item(),
        worst_head_cosine=head_cosines.min().item(),
        gain=out_sum / ref_sum if ref_sum else float(out_sum == 0),
        centred_rel_l1=error / max(centered_size, TINY),
        rounding_floor=rounded / max(centered_size, TINY),
        bad_values=bad_values,
        worst_head_row_cosine_p10=min(_p10(head) for head in cosines),
        suspect=suspect,
        worst_head_centred_rel_l1=head_centered.max().item(),
    )


def _p10(values: torch.Tensor) -> float:
    """Tenth percentile, rounded down to a value that occurs."""
    return values.kthvalue(max(1, math.ceil(0.1 * values.numel()))).values.item()


def errors_of(checked: CheckedOutput, exact: ExactRows, *, dtype: torch.dtype) -> ErrorMetrics:
    """Judge a checked output by the exact rows, or by another output's if they are put there."""
    return compare(
        checked.out,
        exact.out,
        v_mean=exact.mean,
        rounding=dtype,
        bad_values=checked.bad_values,
        suspect=checked.suspect,
    )
