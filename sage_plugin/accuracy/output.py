"""One checked run of a kernel: memory poisoned before it, all values counted, inputs compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from sage_plugin.accuracy.fingerprint import fingerprint

ROUNDINGS = 4
"""The output in its own dtype may differ from the rounded fp32 one by this many epsilons, in
relative L1: torch's own kernels round inside, too."""


@dataclass(frozen=True, slots=True)
class ExactRows:
    """Rows of an exact output, to judge by.

    Attributes:
        rows: the rows, the same for each head.
        out: (B, H, R, Dv), fp32.
        mean: what an output without content would be, (B, H, R or 1, Dv), fp32: the error is also
            taken relative to the distance from it.
    """

    rows: torch.Tensor
    out: torch.Tensor
    mean: torch.Tensor


@dataclass(frozen=True, slots=True)
class CheckedOutput:
    """Sampled rows of a kernel's result before its last rounding.

    Attributes:
        out: (B, H, R, Dv), fp32.
        bad_values: NaN and infinite values over all rows, in fp32 and in the kernel's own dtype.
        suspect: a sentence if the run is wrong in a way that no metric shows, else empty.
    """

    out: torch.Tensor
    bad_values: int
    suspect: str


def checked_output(
    run: Callable[[torch.dtype], torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    exact: ExactRows,
    *,
    size: tuple[int, ...],
    dtype: torch.dtype,
) -> CheckedOutput:
    """Run a kernel in fp32 and in its own dtype, and keep the rows that `exact` has.

    Args:
        run: gives the output (B, H, S, Dv) in a dtype.
        inputs: what it reads, by name; changes of them are noticed.
        exact: exact rows for the same inputs.
        size: of the output.
        dtype: the kernel's own.
    """
    before = {name: fingerprint(tensor) for name, tensor in inputs.items()}
    rows: dict[torch.dtype, torch.Tensor] = {}
    bad_values = 0
    for kind in dict.fromkeys((torch.float32, dtype)):  # once if they are the same
        poison(size, kind, exact.out.device)
        out = run(kind)
        bad_values += sum(int((~torch.isfinite(head)).sum().item()) for head in out)
        rows[kind] = out[:, :, exact.rows]
        del out
    changed = [name for name, tensor in inputs.items() if fingerprint(tensor) != before[name]]
    reasons = [f"it changed its input {name}" for name in changed]
    reasons += _odd_values(rows[dtype], inputs, exact, size)
    reasons += _odd_rounding(rows[torch.float32], rows[dtype])
    return CheckedOutput(out=rows[torch.float32], bad_values=bad_values, suspect="; ".join(reasons))


def poison(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Leave NaN in the memory that the next output of this size is likely to get.

    A kernel that leaves part of its output unwritten then shows NaN, instead of the right result
    of the run before it.
    """
    blocks = [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2)]
    del blocks


def _odd_values(
    out: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    exact: ExactRows,
    size: tuple[int, ...],
) -> Iterator[str]:
    """Outputs that take no account of the data, unless the exact one looks the same."""
    rounded = exact.out.to(out.dtype)
    if _constant(out) and not _constant(rounded):
        yield "its output is constant"
    for name, tensor in inputs.items():
        if tuple(tensor.shape) == size:
            rows = tensor[:, :, exact.rows].to(out.dtype)
            if torch.equal(out, rows) and not torch.equal(rounded, rows):
                yield f"its output is its input {name}"


def _constant(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all().item())


def _odd_rounding(wide: torch.Tensor, own: torch.Tensor) -> Iterator[str]:
    error = (wide - own.float()).abs().sum().item()
    limit = ROUNDINGS * torch.finfo(own.dtype).eps * wide.abs().sum().item()
    if error > limit:
        yield f"its {str(own.dtype).removeprefix('torch.')} output is not its fp32 output, rounded"
