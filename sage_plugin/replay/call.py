"""A call on its device: judged as it was saved, and timed as a patched model makes it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sage_plugin.accuracy.fingerprint import fingerprint
from sage_plugin.accuracy.metrics import attention_errors
from sage_plugin.kernels.attention.api import attention
from sage_plugin.kernels.contract import Decision, bhsd
from sage_plugin.measure.inputs import Tensors, in_layout
from sage_plugin.schema import CallShape, ErrorMetrics, LaunchConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplayCall:
    """Tensors of a call.

    Attributes:
        tensors: Q, K and V, indexed bhsd.
        mask: (B or 1, Hq or 1, Sq or 1, Sk), or `None`.
        shape: their shape, with the layout, scale and causality of the call.
    """

    tensors: Tensors
    mask: torch.Tensor | None
    shape: CallShape

    def prints(self) -> tuple[int, ...]:
        """Hashes of the contents."""
        parts = self.tensors if self.mask is None else (*self.tensors, self.mask)
        return tuple(fingerprint(part) for part in parts)

    def full_size(self, shape: CallShape) -> ReplayCall:
        """The saved heads repeated to the full call, for timing; error is judged on the saved ones.

        The saved ones come over and over; a key head brings its own group of query heads along.
        Mask entries of single batch items and heads go where those go. What is one entry for all
        that was saved stays one entry for all, so that nothing is read, or held, more often than by
        the model; a mask of which a single batch item or head was saved is timed as if it served
        all.

        Args:
            shape: the full call.

        Returns:
            The call in memory as `shape.layout` says; this one where it has that size already.

        Example:
            >>> from sage_plugin.measure.inputs import self_attention, synthetic
            >>> saved = self_attention(1, 2, 16, 8)
            >>> call = ReplayCall(synthetic(saved, device="cpu"), None, saved)
            >>> call.full_size(self_attention(2, 6, 16, 8)).tensors[0].shape
            torch.Size([2, 6, 16, 8])
        """
        if shape == self.shape and shape.layout == "bhsd":
            return self
        q, k, v = self.tensors
        batch = torch.arange(shape.batch, device=k.device) % k.shape[0]
        heads_k = torch.arange(shape.heads_k, device=k.device) % k.shape[1]
        group = shape.heads_q // shape.heads_k
        heads_q = (heads_k[:, None] * group + torch.arange(group, device=k.device)).flatten()

        def repeated(saved: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
            return in_layout(saved[batch][:, heads], shape.layout)

        mask = self.mask
        if mask is not None and mask.shape[:2] != (1, 1):
            first = batch.new_zeros(1)
            items = batch if mask.shape[0] > 1 else first
            mask = mask[items[:, None], heads_q if mask.shape[1] > 1 else first]
        tensors = (repeated(q, heads_q), repeated(k, heads_k), repeated(v, heads_k))
        return ReplayCall(tensors, mask, shape)

    def errors(self, kernel: str, variant: str, config: LaunchConfig | None) -> ErrorMetrics:
        """Metrics of a kernel on this call against the oracle."""
        return attention_errors(
            kernel,
            variant,
            config,
            *self.tensors,
            causal=self.shape.causal,
            scale=self.shape.scale,
            mask=self.mask,
        )

    def whole(
        self, decision: Decision | None = None, config: LaunchConfig | None = None
    ) -> Callable[[], object]:
        """The call with quantisation, or the host's attention where there is no decision.

        Args:
            decision: kernel and variant.
            config: the launch config, `None` for the one that the runtime would find.
        """
        shape = self.shape
        q, k, v = (bhsd(tensor, shape.layout) for tensor in self.tensors)  # its own inverse

        def call() -> object:
            return attention(
                q,
                k,
                v,
                attn_mask=self.mask,
                is_causal=shape.causal,
                scale=shape.scale,
                enable_gqa=shape.heads_q != shape.heads_k,
                kernel="sdpa" if decision is None else decision.kernel,
                variant="auto" if decision is None else decision.variant,
                layout=shape.layout,
                launch=config,
            )

        return call


def runs(call: Callable[[], object]) -> bool:
    """Whether a call runs at its full size, which may take more memory than there is."""
    try:
        call()
    except (RuntimeError, ValueError):
        logger.debug("a call cannot be timed", exc_info=True)
        return False
    return True
