"""Launch code of the kernel that writes new keys and values to pages."""

from __future__ import annotations

import torch

from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.paged_attention.backends.triton.append_kernel import (
    AppendConfig,
    AppendedStrides,
    AppendedTensors,
    append_kernel,
)
from sage_plugin.kernels.paged_attention.backends.triton.attention_kernel import (
    CacheStrides,
    PageStrides,
    QueryStrides,
    ScaleStrides,
)
from sage_plugin.kernels.paged_attention.call import PagedCall
from sage_plugin.kernels.paged_attention.validate import EIGHT_BITS, largest_of


def append_triton(k: torch.Tensor, v: torch.Tensor, call: PagedCall) -> None:
    """Write the new rows of K and V, `(T, Hk, D)`, to the caches of a call."""
    tokens, heads_k, dim = k.shape
    pages, page = call.k_cache.shape[:2]
    cache = call.k_cache.dtype
    config = AppendConfig(
        HEAD_DIM=dim, BLOCK_D=1 << (dim - 1).bit_length(), PAGE=page,
        BLOCK_P=1 << (page - 1).bit_length(),
        LIMIT=largest_of(cache) if cache in EIGHT_BITS else 0.0, ROUND=cache == torch.int8,
    )  # fmt: skip

    def tensors(
        new: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor | None
    ) -> tuple[AppendedTensors, AppendedStrides]:
        strides = AppendedStrides(
            QueryStrides(*new.stride()), CacheStrides(*cache.stride()[:3]),
            ScaleStrides(0, 0) if scale is None else ScaleStrides(*scale.stride()),
            PageStrides(*call.page_table.stride()),
        )  # fmt: skip
        given = AppendedTensors(new, cache, scale, call.page_table, call.kv_lens, call.cu_q_lens)
        return given, strides

    of_k, strides_k = tensors(k, call.k_cache, call.k_scale)
    of_v, strides_v = tensors(v, call.v_cache, call.v_scale)
    tiles = tokens // page + 2 * call.sequences
    launch_graph.launch(
        append_kernel, tiles * heads_k, of_k, of_v, strides_k, strides_v, tokens, call.sequences,
        heads_k, pages, call.max_keys, CONFIG=config,
        num_warps=8 if config.BLOCK_P * config.BLOCK_D > 8192 else 4,  # not tuned: bytes are few
    )  # fmt: skip
