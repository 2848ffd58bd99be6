"""Compile what a call of paged attention would launch, in a process that stands for its device."""

from __future__ import annotations

import torch

from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.absent_device import BuildResources, resources
from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.paged_attention.call import PagedCall
from sage_plugin.kernels.paged_attention.validate import EIGHT_BITS, checked_call
from sage_plugin.measure.inputs import torch_dtype
from sage_plugin.paged_records import PagedLaunch, PagedShape
from sage_plugin.schema import DeviceFacts


def compile_call(
    shape: PagedShape, decision: Decision, config: PagedLaunch, facts: DeviceFacts
) -> tuple[BuildResources, ...]:
    """Compile the launches of a call for the device that this process stands for.

    Nothing runs; the caches have one page, which no build knows of.

    Returns:
        What each kernel takes; nothing for the emulation.

    Raises:
        Exception: whatever the compiler raises where it refuses.
    """
    if decision.variant != "triton":
        return ()
    from sage_plugin.kernels.paged_attention.backends.triton.launch import PagedTriton

    call = empty_call(shape)
    with launch_graph.recording(only_compile=True) as recorder:
        PagedTriton(decision.kernel, checked_call(call), config, None, facts.sm_count).run(call)
    return tuple(resources(launch[-1]) for launch in recorder.launches)


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
