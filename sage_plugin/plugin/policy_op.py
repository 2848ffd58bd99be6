"""The op of calls in a graph whose kernel a policy chooses when the graph runs.

A graph is made once, and a policy changes kernels with the denoising step. The op gets a tensor of
one number that names its layer, so that equal blocks share a graph, and does what the layer does in
eager mode, counting and all; the host's attention is torch's SDPA there. A CUDA graph, which
replays launches and not this code, keeps the kernels that it was captured with.
"""

from __future__ import annotations

import functools

import torch

from sage_plugin import settings
from sage_plugin.kernels.attention.call import AttentionCall
from sage_plugin.kernels.attention.executor import as_promised, empty_as
from sage_plugin.kernels.contract import bhsd
from sage_plugin.plugin import route
from sage_plugin.plugin.context import LAYERS, STACK, Frame

library = torch.library.Library("sage_plugin", "FRAGMENT")


def routed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    handle: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool, layout: str,
) -> torch.Tensor:  # fmt: skip
    """What a layer does with a call; the host's attention once the layer is gone."""

    def host() -> torch.Tensor:
        query, key, value = (bhsd(x, layout) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal,
            scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
        return bhsd(out, layout)

    layer = LAYERS.get(int(handle))
    if layer is None:
        return as_promised(q, host())
    layer.state.disabled = settings.current().disabled
    call = AttentionCall(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa, layout)
    STACK.frames.append(Frame(layer))
    try:
        return as_promised(q, route.attend(host, call, None))
    finally:
        STACK.frames.pop()


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> torch.Tensor:
    return empty_as(q, v.dtype, v.shape[3])


@functools.cache
def ready() -> None:
    """Register the op; again does nothing."""
    library.define(
        "routed(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor handle, float dropout_p, "
        "bool is_causal, float? scale, bool enable_gqa, str layout) -> Tensor"
    )
    for key in ("CPU", "CUDA"):
        library.impl("routed", routed, key)
    torch.library.register_fake("sage_plugin::routed", _fake, lib=library)
