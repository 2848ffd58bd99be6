"""Launch what a call of paged attention would launch, to compile it ahead of time."""

from __future__ import annotations

import torch

from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.paged_attention.call import PagedCall
from sage_plugin.kernels.paged_attention.validate import EIGHT_BITS, checked_call
from sage_plugin.measure.inputs import torch_dtype
from sage_plugin.paged_records import PagedLaunch, PagedShape
from sage_plugin.schema import DeviceFacts


def launch_all(
    shape: PagedShape, decision: Decision, config: PagedLaunch, facts: DeviceFacts
) -> None:
    """Make the launches of a call of a shape, on tensors that are never written."""
    from sage_plugin.kernels.paged_attention.backends.triton.launch import PagedTriton

    call = empty_call(shape)
    PagedTriton(decision.kernel, checked_call(call), config, None, facts.sm_count).run(call)


def empty_call(shape: PagedShape) -> PagedCall:
    """Return a call of a shape whose caches have one page and whose contents are of no meaning."""
    sequences, cache = len(shape.q_lens), getattr(torch, shape.cache_dtype)
    page = (1, shape.page_size, shape.heads_k, shape.head_dim)
    integers = {"dtype": torch.int32}
    scale = torch.empty(1, shape.heads_k) if cache in EIGHT_BITS else None
    return PagedCall(
        torch.empty(shape.tokens, shape.heads_q, shape.head_dim, dtype=torch_dtype(shape.dtype)),
        torch.empty(page, dtype=cache), torch.empty(page, dtype=cache),
        torch.empty((sequences, shape.max_keys // shape.page_size), **integers),  # type: ignore[call-overload]
        torch.empty(sequences, **integers), torch.empty(sequences + 1, **integers),  # type: ignore[call-overload]
        None, scale, scale,
    )  # fmt: skip
