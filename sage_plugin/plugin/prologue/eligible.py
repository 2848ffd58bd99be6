"""Whether norm and embedding of Q and K may be put off: reasons against it, and the check."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sage_plugin.kernels.attention.prologue.apply import KERNEL_DTYPES, runs_on
from sage_plugin.kernels.surroundings import are_plain, wants_gradient
from sage_plugin.plugin.context import LayerContext
from sage_plugin.plugin.prologue.unfused import Unfused

UNITS = {torch.float16: 4, torch.bfloat16: 4, torch.float32: 64}
"""Units in the last place of a row's largest value by which two ways to compute it may differ. Both
round twice in 16 bits, and an embedding adds two channels; in fp32 means and roots differ too."""
_callback: Callable[[], object] = getattr(
    getattr(torch._C._dynamo, "eval_frame", None), "get_eval_frame_callback", lambda: None
)
"""What looks at each new frame of Python in this thread while compiled code runs."""
COMPARED_AT_ONCE = 1 << 24
"""Values that are compared at once."""


def obstacle(layer: LayerContext, x: torch.Tensor, *others: torch.Tensor) -> Unfused | None:
    """Why the work on a tensor is not put off, `None` where it is."""
    options = layer.state.options
    if layer.state.disabled:
        return Unfused.DISABLED
    if options.policy is None and options.kernel == "sdpa":
        return Unfused.EXACT
    if not are_plain(x, *others):
        return Unfused.DISTURBED
    if _callback() not in (None, False):
        return Unfused.COMPILED
    if not runs_on(x.device):
        return Unfused.DEVICE
    if x.dtype not in KERNEL_DTYPES:
        return Unfused.DTYPE
    if wants_gradient(x, *others):
        return Unfused.GRADIENT
    return Unfused.AUTOCAST if torch.is_autocast_enabled(x.device.type) else None


def is_rounding(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether results differ by no more than rounding does, row by row; waits for the device."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    limit = UNITS[found.dtype] * torch.finfo(found.dtype).eps
    rows = max(1, COMPARED_AT_ONCE // max(1, found[:, :, :1].numel()))
    return all(
        _is_near(a, b, limit)
        for a, b in zip(found.split(rows, 2), expected.split(rows, 2), strict=True)
    )


def _is_near(found: torch.Tensor, expected: torch.Tensor, limit: float) -> bool:
    a, b = found.float(), expected.float()
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite):
        return False
    zero = b.new_zeros(())
    a, b = torch.where(finite, a, zero), torch.where(finite, b, zero)
    largest = b.abs().amax(-1, keepdim=True)
    return bool(((a - b).abs() <= limit * largest).all())
