"""Runs a transformers model's attention on one of our kernels, counted, and records its calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import sage_plugin
from sage_plugin.errors import UnsupportedInputError

NAME = "sage_real_models"
"""The implementation's name in transformers' process-wide registry."""

NOT_PASSED_ON = ("softcap", "s_aux", "position_bias", "sliding_window")
"""Arguments with a meaning that none of these models uses: refused rather than ignored."""


@dataclass(frozen=True, slots=True)
class Call:
    """One attention call as the model made it.

    Attributes:
        layer: index of the attention layer.
        q: (B, Hq, Sq, D).
        k: (B, Hk, Sk, D), not expanded.
        v: (B, Hk, Sk, D).
        mask: (B, 1, Sq, Sk), bool, or `None`.
        causal: whether later keys are hidden.
        scale: factor of the scores.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    scale: float | None


@dataclass(slots=True)
class KernelAttention:
    """An attention function for transformers' `AttentionInterface`.

    Attributes:
        kernel: kernel that every call runs on; one that it cannot take raises.
        recording: keep a copy of every call.
        calls: how many calls ran on the kernel.
        recorded: the copies.
    """

    kernel: str
    recording: bool = False
    calls: int = 0
    recorded: list[Call] = field(default_factory=list)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of one layer: (B, Hq, Sq, D) in, (B, Sq, Hq, D) out."""
        unknown = [name for name in NOT_PASSED_ON if others.get(name) is not None]
        if unknown or dropout:
            raise UnsupportedInputError(
                f"{unknown or 'dropout'} in a call of {type(module).__name__}"
            )
        wanted = getattr(module, "is_causal", False) if is_causal is None else is_causal
        square = 1 < query.shape[2] == key.shape[2]
        causal = bool(wanted) and attention_mask is None and square
        if self.recording:
            copies = (None if t is None else t.detach().clone().cpu() for t in
                      (query, key, value, attention_mask))  # fmt: skip
            self.recorded.append(Call(self.calls, *copies, causal, scaling))  # type: ignore[arg-type]
        out = sage_plugin.attention(
            query,
            key,
            value,
            attention_mask,
            is_causal=causal,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
            kernel=self.kernel,
        )
        self.calls += 1
        return out.transpose(1, 2), None


@contextlib.contextmanager
def running_on(model: Any, kernel: str, *, recording: bool = False) -> Iterator[KernelAttention]:
    """The model's attention on a kernel inside a `with` block, and as it was after it."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    hook = KernelAttention(kernel, recording)
    before = model.config._attn_implementation
    AttentionInterface.register(NAME, hook)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    try:
        yield hook
    finally:
        model.set_attn_implementation(before)
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(NAME)  # the registry has no other way out
