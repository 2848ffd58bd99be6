"""What a skilled user combines from other packages for a faster step; no program."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

LEAST_FEATURES = 512
"""Narrower linears cost more quantized than they save."""


def quantize_linears(model: nn.Module) -> None:
    """Put the linears of the repeated blocks on torchao's dynamic FP8, one scale per row.

    Modulations and embeddings stay, as in the hand lists of torchao's users.
    """
    torchao = importlib.import_module("torchao.quantization")
    # Its own inductor settings are process-wide and would reach the other variants.
    config = torchao.Float8DynamicActivationFloat8WeightConfig(
        granularity=torchao.PerRow(), set_inductor_config=False
    )
    torchao.quantize_(model, config, filter_fn=_in_a_block)


def _in_a_block(module: nn.Module, name: str) -> bool:
    return (
        isinstance(module, nn.Linear)
        and "block" in name
        and "norm" not in name
        and min(module.in_features, module.out_features) >= LEAST_FEATURES
    )


def attend_with_fa3(model: nn.Module) -> None:
    """Run a model's attention without a mask on FlashAttention 3 in bf16 (`fa3-fwd`)."""
    fa3 = importlib.import_module("fa3_fwd_interface").flash_attn_func
    torchs = F.scaled_dot_product_attention

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, **others: Any,  # noqa: ANN401
    ) -> torch.Tensor:  # fmt: skip
        if attn_mask is not None or dropout_p:
            return torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **others)
        nhd = (x.transpose(1, 2) for x in (query, key, value))
        return fa3(*nhd, softmax_scale=scale, causal=is_causal).transpose(1, 2)

    forward = model.forward

    def with_fa3(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        F.scaled_dot_product_attention = attend
        try:
            return forward(*args, **kwargs)
        finally:
            F.scaled_dot_product_attention = torchs

    model.forward = with_fa3  # type: ignore[method-assign]


def _torchao_and_fa3(model: nn.Module) -> None:
    quantize_linears(model)
    attend_with_fa3(model)


PEERS: dict[str, Callable[[nn.Module], None]] = {
    "torchao": quantize_linears,
    "fa3": attend_with_fa3,
    "torchao+fa3": _torchao_and_fa3,
}
"""Each changes a model in place."""
