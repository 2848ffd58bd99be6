"""`paged_attention()`: ragged queries against keys and values in pages."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sage_plugin.kernels.launch_graph import Outputs
from sage_plugin.kernels.paged_attention.call import PagedCall
from sage_plugin.kernels.paged_attention.dispatch import parse_kernel
from sage_plugin.kernels.paged_attention.executor import resolve
from sage_plugin.kernels.paged_attention.torch_ops import request_of, run_by_op
from sage_plugin.kernels.paged_attention.validate import check_tensors, checked_call
from sage_plugin.kernels.surroundings import can_bypass_dispatcher

__all__ = ["paged_attention"]

observers: list[Callable[[PagedCall, object], None]] = []
"""Called in eager mode with each call before it runs, and the module that makes it or `None`."""


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_q_lens: torch.Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = True,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of several sequences whose keys and values lie in pages of a shared cache.

    The keys of sequence b are the first `kv_lens[b]` of the pages that row b of `page_table` names,
    those of its own new tokens among them; its queries are the rows `cu_q_lens[b]` up to
    `cu_q_lens[b + 1]` of Q. Decoding (a row for each sequence), prefill (many rows for one) and
    batches of both are one call. On a GPU the contents of the integer tensors are read by kernels
    alone: a CUDA graph of the call serves other lengths and pages.

    Args:
        q: `(T, Hq, D)` fp16, bf16 or fp32; D up to 256.
        k_cache: `(pages, page_size, Hk, D)` in Q's dtype, float8_e4m3fn or int8; Hq a multiple of
            Hk. Strides are free but for channels, which lie side by side.
        v_cache: likewise.
        page_table: `(B, max_pages)` int32 or int64. Keys of an entry that is no page, such as -1,
            are hidden; nothing is read for it.
        kv_lens: `(B,)` int32 or int64. On a GPU keys past the end of the table are hidden.
        cu_q_lens: `(B + 1,)` int32 or int64, rising from 0.
        scale: factor of the scores, `1/sqrt(D)` if `None`.
        is_causal: bottom-right aligned in each sequence: the last query sees every key.
        window: keys that a row sees to the left and right of its own position, -1 for all.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 for none.
        sinks: `(Hq,)`, one more logit for each head, which takes weight and has no value.
        k_scale: `(pages, Hk)` float32, what numbers of an 8-bit cache are multiplied by: required
            for int8, 1 if `None` for FP8.
        v_scale: likewise, of values.
        kernel: `"fav2"` (queries as they are, 8-bit caches multiplied in fp16), `"qk_int8"` and
            `"qk_fp8"` (queries quantized as the cache is), or `"auto"`, which is `"fav2"`; a
            backend may follow, as in `"fav2:emulation"`. On a CPU the emulation runs.
        return_lse: also return the natural-log LSE, fp32 `(Hq, T)`.

    Returns:
        The output `(T, Hq, D)`, or `(output, lse)`. Rows that see no key, and rows of Q behind the
        last sequence, are 0 with an LSE of -inf, or of their sink.

    Raises:
        UnsupportedInputError: arguments that do not fit together, or that no kernel takes here.
        UnknownKernelError: no kernel or backend of that name.

    Example:
        >>> import torch, sage_plugin
        >>> k, v = torch.randn(2, 9, 16, 2, 64)
        >>> q = torch.randn(5, 4, 64)  # one new token, and a prompt of four
        >>> table = torch.tensor([[3, 7, 1], [2, -1, -1]], dtype=torch.int32)
        >>> lens, ends = torch.tensor([40, 4]), torch.tensor([0, 1, 5])
        >>> sage_plugin.paged_attention(q, k, v, table, lens, ends).shape
        torch.Size([5, 4, 64])
    """
    call = PagedCall(
        q, k_cache, v_cache, page_table, kv_lens, cu_q_lens, sinks, k_scale, v_scale, scale,
        is_causal, window, softcap, return_lse,
    )  # fmt: skip
    out, lse = attended(call, kernel)
    return out if lse is None else (out, lse)


def attended(call: PagedCall, kernel: str, caller: object = None) -> Outputs:
    """Run a call that is checked first, and told to `observers`.

    Args:
        call: the call.
        kernel: as `paged_attention` takes it.
        caller: the attention module that makes it, `None` for anybody.

    Returns:
        The output, and the LSE or `None`.

    Raises:
        UnsupportedInputError: arguments that do not fit together, or that no kernel takes here.
        UnknownKernelError: no kernel or backend of that name.
    """
    check_tensors(call)
    executor = None
    if can_bypass_dispatcher(*call.tensors()):
        executor = resolve(call, request_of(kernel))
    else:
        checked_call(call)
        parse_kernel(kernel)
    if not torch.compiler.is_compiling():
        for observer in tuple(observers):
            observer(call, caller)
    return run_by_op(call, kernel) if executor is None else executor.run(call)
