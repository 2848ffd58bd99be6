"""Launch code of paged attention: from a call and its launch configs to grids and arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton.language as tl

from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.launch_config import compiler_options
from sage_plugin.kernels.launch_graph import Outputs
from sage_plugin.kernels.paged_attention.backends.emulation import q_limit
from sage_plugin.kernels.paged_attention.backends.triton.attention_kernel import (
    CacheStrides,
    PagedConfig,
    PagedStrides,
    PagedTensors,
    PageStrides,
    QueryStrides,
    ScaleStrides,
    paged_attention_kernel,
)
from sage_plugin.kernels.paged_attention.backends.triton.combine_kernel import (
    SplitTensors,
    combine_kernel,
)
from sage_plugin.kernels.paged_attention.call import PagedCall
from sage_plugin.kernels.paged_attention.launch_space import MOST_SPLITS, tile_rows
from sage_plugin.kernels.paged_attention.validate import EIGHT_BITS, PagedNumbers
from sage_plugin.kernels.quantize.recipe import LOG2E
from sage_plugin.paged_records import PagedLaunch

QUANTIZED = {"fav2": 0, "qk_int8": 1, "qk_fp8": 2}
TYPES = {
    torch.int8: tl.int8,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e4m3fnuz: tl.float8e4b8,
}
EVEN, RESIDENT, SPLIT_KEYS = 16, 4, 1024  # not tuned: the splits of a launch config are
"""Decoding: programs for each multiprocessor with which none waits long for the last; those for
each byte of a cache's element that fill it; the keys of a split that are worth a program beyond
them. On an H200 one sequence of 32,768 keys takes 67 us in 128 splits, 75 in 64 and 94 in 32;
sixteen of 8,192 take 144 to 146 us in 6 to 12."""


class PagedTriton:
    """Runs the calls of one key: one launch, or two where sequences of both kinds may be there.

    Calls of one kind have one launch config, which takes all sequences. Mixed ones have a second,
    which takes those with so few tokens that one of its tiles holds them.
    """

    def __init__(
        self,
        kernel: str,
        numbers: PagedNumbers,
        launch: PagedLaunch,
        few: PagedLaunch | None,
        processors: int,
    ) -> None:
        self._kernel, self._numbers = kernel, numbers
        self._launch, self._few, self._processors = launch, few, processors

    def run(self, call: PagedCall) -> Outputs:
        """Launch attention for each kind of sequence, and a combination where keys were split."""
        q = call.q
        tokens, heads_q, _ = q.shape
        out = torch.empty(q.shape, dtype=call.out_dtype or q.dtype, device=q.device)
        lse = None
        if call.return_lse:
            lse = torch.empty((heads_q, tokens), dtype=torch.float32, device=q.device)
        if out.numel() == 0:
            return out, lse
        if self._few is None:
            self._part(call, out, lse, self._launch, 0, 0)
        else:
            most = max(tile_rows(call.group), self._few.block_m) // call.group
            self._part(call, out, lse, self._few, 0, most)
            self._part(call, out, lse, self._launch, most + 1, 0)
        return out, lse

    def _part(
        self,
        call: PagedCall,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        launch: PagedLaunch,
        min_q: int,
        max_q: int,
    ) -> None:
        """Run the sequences of at least and at most so many tokens."""
        q, table = call.q, call.page_table
        tokens, heads_q, _ = q.shape
        pages, _, heads_k, _ = call.k_cache.shape
        config = self._config(call, launch, min_q, max_q)
        tiles = call.sequences if max_q else tokens // config.BLOCK_Q + call.sequences + 1
        rows = call.sequences * max_q if max_q else tokens
        parts, part_lse = out, lse
        if config.SPLITS > 1:
            shape = (rows, heads_q, config.SPLITS)
            parts = launch_graph.empty(q.device, torch.float32, *shape, q.shape[2])
            part_lse = launch_graph.empty(q.device, torch.float32, *shape)
        tensors = PagedTensors(
            q, parts, part_lse, table, call.kv_lens, call.cu_q_lens, call.k_scale, call.v_scale,
            call.sinks,
        )  # fmt: skip
        caches: tuple[Any, Any] = (call.k_cache, call.v_cache)
        if config.TMA:
            caches = (_described(caches[0], config.BLOCK_N), _described(caches[1], config.BLOCK_N))
        numbers = self._numbers
        launch_graph.launch(
            paged_attention_kernel, tiles * heads_k * config.SPLITS, *caches, tensors,
            _strides(call), tokens, call.sequences, tiles, heads_k, pages, call.max_keys,
            numbers.left, numbers.right, numbers.scale * LOG2E, numbers.softcap * LOG2E,
            CONFIG=config, **compiler_options(launch),
        )  # fmt: skip
        if config.SPLITS > 1:
            split = SplitTensors(parts, part_lse, out, lse, call.cu_q_lens, call.sinks)
            width = 1 << (config.SPLITS - 1).bit_length()
            launch_graph.launch(
                combine_kernel, rows * heads_q, split, tokens, call.sequences, heads_q,
                CONFIG=config, BLOCK_S=width,
                num_warps=4 if width * config.BLOCK_D > 4096 else 1,  # not tuned: a row is little
            )  # fmt: skip

    def _config(self, call: PagedCall, launch: PagedLaunch, min_q: int, max_q: int) -> PagedConfig:
        """What the kernels are compiled for."""
        numbers, cache = self._numbers, call.k_cache.dtype
        head_dim, page = call.q.shape[2], call.k_cache.shape[1]
        eight = cache in EIGHT_BITS
        decode = max_q > 0 or call.kind() == "decode"
        block_m = max(launch.block_m, tile_rows(call.group))
        config = PagedConfig(
            HEAD_DIM=head_dim, BLOCK_D=max(32 if eight else 16, 1 << (head_dim - 1).bit_length()),
            BLOCK_M=block_m, BLOCK_Q=block_m // call.group, GROUP=call.group,
            BLOCK_N=launch.block_n, PAGE=page, WITHIN=page % launch.block_n == 0, SPLITS=1,
            STAGES=launch.num_stages, MIN_Q=min_q, MAX_Q=max_q, HEADS_FIRST=decode, CACHE8=eight,
            QUANTIZED=QUANTIZED[self._kernel],
            Q_TYPE=tl.float16 if self._kernel == "fav2" else TYPES[cache],
            Q_LIMIT=q_limit(self._kernel, cache), FINITE=cache == torch.int8,
            FOLD=page % launch.block_n == 0 and numbers.scale > 0.0 and numbers.softcap == 0.0,
            TMA=launch.loads == "descriptor" and _are_described(call.k_cache, call.v_cache),
            LEFT=numbers.left >= 0, RIGHT=numbers.right >= 0,
            SOFTCAP=numbers.softcap > 0.0, SINKS=call.sinks is not None, LSE=call.return_lse,
        )  # fmt: skip
        return dataclasses.replace(config, SPLITS=self._splits(call, launch, config, decode))

    def _splits(
        self, call: PagedCall, launch: PagedLaunch, config: PagedConfig, decode: bool
    ) -> int:
        """How many programs share the keys of a tile, from shapes alone."""
        steps = -(-call.max_keys // config.BLOCK_N)
        if launch.splits:
            return max(1, min(launch.splits, steps))
        most = max(1, min(MOST_SPLITS, steps // 2))
        tiles = -(-call.q.shape[0] // config.BLOCK_Q)
        if decode:
            tiles = call.sequences if config.MAX_Q > 0 else max(call.sequences, tiles)
        pairs = max(1, tiles * call.k_cache.shape[2])
        if not decode:
            return max(1, min(most, self._processors // pairs))
        resident = RESIDENT * call.k_cache.element_size()
        even, fill = (-(-n * self._processors // pairs) for n in (EVEN, resident))
        return min(most, even, max(fill, -(-call.max_keys // SPLIT_KEYS)))


def _strides(call: PagedCall) -> PagedStrides:
    def cache(tensor: torch.Tensor) -> CacheStrides:
        return CacheStrides(*tensor.stride()[:3])

    def scale(tensor: torch.Tensor | None) -> ScaleStrides:
        return ScaleStrides(0, 0) if tensor is None else ScaleStrides(*tensor.stride())

    return PagedStrides(
        QueryStrides(*call.q.stride()), cache(call.k_cache), cache(call.v_cache),
        PageStrides(*call.page_table.stride()), scale(call.k_scale), scale(call.v_scale),
    )  # fmt: skip


def _are_described(*caches: torch.Tensor) -> bool:
    """Whether descriptors can have the strides of caches: heads side by side, whole 16 bytes."""
    for cache in caches:
        page, slot, head, _ = cache.stride()
        places = (page, slot, cache.storage_offset())
        if head != cache.shape[3] or any(n * cache.element_size() % 16 for n in places):
            return False
    return True


def _described(cache: torch.Tensor, block_n: int) -> Any:  # noqa: ANN401
    """A TMA descriptor of tiles inside of a page."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    pages, size, heads, dim = cache.shape
    rows = cache.as_strided((pages, size, heads * dim), (*cache.stride()[:2], 1))
    return TensorDescriptor.from_tensor(rows, [1, block_n, dim])
