"""One checked run of a kernel: memory poisoned before it, all values counted, inputs compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sage_plugin.accuracy.fingerprint import fingerprint
from sage_plugin.accuracy.reference import Reference
from sage_plugin.kernels.attention import api
from sage_plugin.schema import LaunchConfig

ROUNDINGS = 4
"""The output in its own dtype may differ from the rounded fp32 one by this many epsilons, in
relative L1: torch's own attention rounds inside, too."""


@dataclass(frozen=True, slots=True)
class CheckedOutput:
    """Sampled rows of a kernel's result before its last rounding.

    Attributes:
        out: (B, Hq, R, Dv), fp32.
        bad_values: NaN and infinite values over all rows, in fp32 and in the kernel's own dtype.
        suspect: a sentence where the run is wrong in a way that no metric shows, else empty.
    """

    out: torch.Tensor
    bad_values: int
    suspect: str


def checked_output(
    kernel: str,
    variant: str,
    launch: LaunchConfig | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    exact: Reference,
    mask: torch.Tensor | None = None,
) -> CheckedOutput:
    """Run a kernel twice, in fp32 and in V's dtype, and keep the rows that `exact` has.

    Args:
        kernel: kernel name; variant and launch as in `attention`.
        variant: variant name, `"host"` for torch's own kernels.
        launch: launch config or `None`.
        q: (B, Hq, Sq, D), indexed bhsd; k and v likewise.
        k: keys.
        v: values.
        causal: bottom-right aligned causal mask.
        scale: factor of the scores or `None`.
        exact: the oracle's rows for the same inputs.
        mask: (B or 1, Hq or 1, Sq or 1, Sk) or `None`.
    """
    inputs = {"q": q, "k": k, "v": v} | ({} if mask is None else {"mask": mask})
    before = {name: fingerprint(tensor) for name, tensor in inputs.items()}
    rows: dict[torch.dtype, torch.Tensor] = {}
    bad_values = 0
    for dtype in dict.fromkeys((torch.float32, v.dtype)):  # once where they are the same
        poison((*q.shape[:3], v.shape[3]), dtype, q.device)
        out: torch.Tensor = api.attention(  # type: ignore[assignment]
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
            kernel=kernel,
            variant=variant,
            launch=launch,
            out_dtype=dtype,
        )
        bad_values += sum(int((~torch.isfinite(head)).sum().item()) for head in out)
        rows[dtype] = out[:, :, exact.rows]
        del out
    changed = [name for name, tensor in inputs.items() if fingerprint(tensor) != before[name]]
    reasons = [f"it changed its input {name}" for name in changed]
    reasons += _odd_values(rows[v.dtype], inputs, exact)
    reasons += _odd_rounding(rows[torch.float32], rows[v.dtype])
    return CheckedOutput(out=rows[torch.float32], bad_values=bad_values, suspect="; ".join(reasons))


def poison(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Leave NaN in the memory that the next output of this size is likely to get.

    A kernel that leaves part of its output unwritten then shows NaN, instead of the right result
    of the run before it.
    """
    blocks = [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2)]
    del blocks


def _odd_values(
    out: torch.Tensor, inputs: dict[str, torch.Tensor], exact: Reference
) -> Iterator[str]:
    """Outputs that take no account of the data, unless the exact one looks the same."""
    rounded = exact.out.to(out.dtype)
    if _constant(out) and not _constant(rounded):
        yield "its output is constant"
    for name, tensor in inputs.items():
        if name != "mask" and tensor.shape == inputs["q"].shape and out.shape[3] == tensor.shape[3]:
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
