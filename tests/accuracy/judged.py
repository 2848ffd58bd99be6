"""A kernel on tensors that are at hand, judged as captures are."""

from __future__ import annotations

from sage_plugin.families.attention.replay import AttentionReplay
from sage_plugin.kernels.attention.call import shape_of
from sage_plugin.kernels.contract import Decision
from sage_plugin.schema import ErrorMetrics


def attention_errors(
    kernel, variant, launch, q, k, v, *, causal, scale, mask=None, rows=None
) -> ErrorMetrics:
    """Run a kernel on tensors `(B, H, S, D)` and judge it against the oracle."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    shape = shape_of(q, k, v, causal=causal, scale=scale, layout="bhsd")
    return AttentionReplay((q, k, v), mask, shape).errors(Decision(kernel, variant), launch, rows)
