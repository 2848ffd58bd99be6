"""The grouped linears of a mixture's experts, from its configuration alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sage_plugin.errors import UsageError
from sage_plugin.schema import LinearShape

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOICES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
INNER = ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
"""How configurations name experts, those of a token, and their inner channels; the first counts."""


def expert_shapes(
    config: Mapping[str, Any], tokens: Iterable[int], dtype: str, devices: int = 1
) -> list[LinearShape]:
    """Return both grouped linears of the experts for each number of tokens.

    Args:
        config: the model's configuration.
        tokens: tokens of a forward.
        dtype: dtype of inputs and outputs.
        devices: devices that share the inner channels.

    Raises:
        UsageError: the configuration tells no experts, or devices do not divide their channels.

    Example:
        >>> config = {"num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64,
        ...     "intermediate_size": 96}
        >>> up, down = expert_shapes(config, [5], "bfloat16")
        >>> (up.rows, up.in_features, up.out_features), (down.in_features, down.out_features)
        ((10, 64, 192), (96, 64))
    """
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config = {**config, **inner}
    groups, choices, channels, hidden = (
        _first(config, names) for names in (EXPERTS, CHOICES, INNER, ("hidden_size",))
    )
    if channels % devices:
        raise UsageError(f"--tp-size {devices} does not divide {channels} channels of an expert")
    local = channels // devices
    return [
        LinearShape(count * choices, k, n, dtype, groups=groups)
        for count in tokens
        for k, n in ((hidden, 2 * local), (local, hidden))
    ]


def _first(config: Mapping[str, Any], names: Iterable[str]) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise UsageError(f"the model's configuration has none of {', '.join(names)}, as mixtures have")
