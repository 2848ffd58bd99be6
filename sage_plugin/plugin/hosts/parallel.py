"""Context parallel attention: diffusers exchanges the parts of a sequence, our kernels attend.

Diffusers spreads a sequence over devices (`enable_parallelism`). Ulysses gathers all of it for a
share of the heads; a ring passes K and V on, and merges the outputs of its parts by their LSE.
Both take the attention of a part as a function, which here is one of our kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sage_plugin.kernels.attention.api import attention as function
from sage_plugin.kernels.attention.call import AttentionCall

EXCHANGE = "_templated_context_parallel_attention"
"""Diffusers' function, beside its `dispatch_attention_fn`."""


def exchange_of(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor] | None:
    """The function of diffusers that exchanges parts, `None` where a release has none."""
    found: Callable[..., torch.Tensor] | None = getattr(original, "__globals__", {}).get(EXCHANGE)
    return found


class Degrees(NamedTuple):
    """Over how many devices a sequence is spread, in each of the two ways."""

    ulysses: int
    ring: int


def degrees_of(config: Any) -> Degrees | None:  # noqa: ANN401
    """How a `ParallelConfig` of diffusers spreads a sequence, `None` where it does not."""
    context = getattr(config, "context_parallel_config", None)
    if context is None:
        return None
    return Degrees(context.ulysses_degree or 1, context.ring_degree or 1)


def as_exchanged(call: AttentionCall, degrees: Degrees) -> AttentionCall:
    """A call with the lengths and heads that a kernel will see; its numbers mean nothing.

    Args:
        call: this device's part, `(B, S, H, D)`.
        degrees: how the sequence is spread.
    """
    shares = degrees.ulysses
    heads = max(1, call.q.shape[2] // shares)

    def gathered(x: torch.Tensor) -> torch.Tensor:
        return x[:, :1, :1].expand(x.shape[0], x.shape[1] * shares, heads, x.shape[3])

    if call.q.dim() != 4 or shares == 1:
        return call._replace(attn_mask=None)
    q, k, v = (gathered(x) for x in (call.q, call.k, call.v))
    return call._replace(q=q, k=k, v=v, attn_mask=None)


def attention(
    exchange: Any,  # noqa: ANN401
    attend: Callable[..., Any],
    call: AttentionCall,
    config: Any,  # noqa: ANN401
) -> torch.Tensor:
    """The call through diffusers' exchange.

    Args:
        exchange: what `exchange_of` found.
        attend: routes one part.
        call: this device's part.
        config: diffusers' `ParallelConfig`.
    """

    def part(
        ctx: object, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
        _save_ctx: bool = True, _parallel_config: object = None,
    ) -> Any:  # noqa: ANN401  # fmt: skip
        query, key, value = arrived(query), arrived(key), arrived(value)
        one = AttentionCall(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, "bshd",
            return_lse=return_lse,
        )  # fmt: skip

        def host() -> Any:  # noqa: ANN401
            return function(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                kernel="sdpa", layout="bshd", return_lse=return_lse,
            )  # fmt: skip

        result = attend(host, one, None)
        return (result[0], result[1].transpose(1, 2)) if return_lse else result

    out: torch.Tensor = exchange(
        call.q, call.k, call.v, call.attn_mask, call.dropout_p, call.is_causal, call.scale,
        call.enable_gqa, False, forward_op=part, backward_op=_no_backward, _parallel_config=config,
    )  # fmt: skip
    return out


def arrived(part: torch.Tensor) -> torch.Tensor:
    """A tensor that may be on its way from another device, once it is here.

    Example:
        >>> arrived(torch.ones(2))
        tensor([1., 1.])
    """
    wait: Callable[[], torch.Tensor] | None = getattr(part, "wait", None)
    return part if wait is None else wait()


def _no_backward(*args: object, **options: object) -> None:
    raise AssertionError("a call that needs a gradient is the host's")
