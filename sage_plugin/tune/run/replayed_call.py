"""A recorded or drawn call, judged as it was saved and timed as a patched model makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sage_plugin.accuracy.fingerprint import fingerprint
from sage_plugin.capture.store.reader import CapturedCall
from sage_plugin.kernels.attention.api import attention
from sage_plugin.kernels.contract import Decision
from sage_plugin.measure.inputs import Tensors, full_size, in_layout, synthetic
from sage_plugin.measure.masks import full_mask, synthetic_mask
from sage_plugin.schema import CallShape, LaunchConfig


@dataclass(frozen=True, slots=True)
class Masked:
    """Q, K and V of a call, indexed bhsd, and its mask (B or 1, Hq or 1, Sq or 1, Sk)."""

    tensors: Tensors
    mask: torch.Tensor | None

    def prints(self) -> tuple[int, ...]:
        """Hashes of the contents."""
        parts = self.tensors if self.mask is None else (*self.tensors, self.mask)
        return tuple(fingerprint(part) for part in parts)


def drawn_call(
    shape: CallShape, *, device: str, seed: int = 0, distribution: str = "normal"
) -> Masked:
    """A call of synthetic inputs; `distribution` is a name of `measure.inputs.DISTRIBUTIONS`."""
    tensors = synthetic(shape, device=device, seed=seed, distribution=distribution)
    return Masked(tensors, synthetic_mask(shape, device=device, seed=seed))


def saved_call(call: CapturedCall) -> Masked:
    """What a capture holds, on which errors are judged."""
    return Masked((call.q, call.k, call.v), call.mask)


def timed_call(call: CapturedCall, device: str) -> Masked:
    """What is timed of a capture: on a GPU the full call, on a CPU what was saved."""
    if device != "cpu":
        return Masked(full_size(call), full_mask(call))
    q, k, v = (in_layout(tensor, call.record.shape.layout) for tensor in (call.q, call.k, call.v))
    return Masked((q, k, v), call.mask)


def as_layout(tensors: Tensors, layout: str) -> Tensors:
    """The same memory, indexed as the layout names it."""
    if layout == "bhsd":
        return tensors
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
    return q, k, v


def whole_call(
    timed: Masked, shape: CallShape, decision: Decision | None, config: LaunchConfig | None
) -> Callable[[], object]:
    """A call with quantisation, or the host's attention where there is no decision.

    Args:
        timed: the tensors.
        shape: the call.
        decision: kernel and variant.
        config: the launch config, `None` for the one that the runtime would find.
    """
    q, k, v = as_layout(timed.tensors, shape.layout)

    def call() -> object:
        return attention(
            q,
            k,
            v,
            attn_mask=timed.mask,
            is_causal=shape.causal,
            scale=shape.scale,
            enable_gqa=shape.heads_q != shape.heads_k,
            kernel="sdpa" if decision is None else decision.kernel,
            variant="auto" if decision is None else decision.variant,
            layout=shape.layout,
            launch=config,
        )

    return call
