"""Caches of transformers' continuous batching in 8 bits, with a scale for each page and key head.

The cache is transformers' own, made for a type of one byte; what it does with keys and values is
replaced, for that one object. Batches with prompts among them get a table of pages too, from the
indices that they come with: every key is written to its page first and read there.

Of a page, transformers reads K and V of all layers from one buffer, each shifted by its place
(`full_attention.py`). The scales lie likewise: one for each page of K or V of each layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sage_plugin.errors import PatchError, UnsupportedInputError

CACHE = "transformers.generation.continuous_batching.cache"
FULL = "full_attention"
"""The kind of layers whose caches have tables of pages."""


@dataclass(slots=True, eq=False)
class EightBitPages:
    """What a cache in 8 bits does in place of its own methods.

    Attributes:
        cache: the `PagedAttentionCache`.
        scales: `(pages of K and of V, Hk)` fp32, in the order of the cache's buffer.
        is_ours: whether the model's attention is ours, which alone knows of scales.
        table: pages of the batch that runs, from its first layer on; `None` before.
    """

    cache: Any
    scales: torch.Tensor
    is_ours: Callable[[], bool]
    table: torch.Tensor | None = None

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Name the pages of a layer among the arguments of its attention, which writes to them.

        Args:
            key: `(1, Hk, tokens, D)`, of the new tokens; returned as it is.
            value: likewise.
            layer_idx: number of the layer.
            kwargs: what else attention gets; changed in place.

        Raises:
            UnsupportedInputError: attention is not ours.
        """
        if not self.is_ours():
            raise UnsupportedInputError(
                "this manager has a cache in 8 bits, and sage_plugin.continuous_batching is closed "
                "or has another; make a new manager, or open it again with this cache"
            )
        allocator = self.cache.layer_to_allocator[layer_idx]
        place = allocator.layer_indices.index(layer_idx)
        if kwargs.get("block_table") is None:
            if place == 0:
                self.table = self._table_of(allocator, kwargs)
            for name in ("cu_seq_lens_k", "max_length_k"):
                kwargs[name] = kwargs[name][allocator.layer_type]
            kwargs["block_table"] = self.table
            kwargs["k_cache"], kwargs["v_cache"] = allocator.get_cache_for_block_table(layer_idx)
        else:
            type(self.cache).update(self.cache, key, value, layer_idx, kwargs)
        pages = kwargs["k_cache"].shape[0]
        for name, first in (("k_scale", 2 * place), ("v_scale", 2 * place + 1)):
            kwargs[name] = self.scales[first : first + pages]
        return key, value

    def _table_of(self, allocator: Any, kwargs: dict[str, Any]) -> torch.Tensor:  # noqa: ANN401
        """`(sequences, pages)` int32 of a batch that has an index for each key in its place.

        Sequences begin with a page, so that the first key of each page tells its number. Prompts
        without anything before them are indexed where they are written alone.
        """
        read = kwargs["read_index"][allocator.index]
        of_keys = read if read.numel() else kwargs["write_index"][allocator.index]
        ends, size = kwargs["cu_seq_lens_k"][allocator.layer_type], allocator.tokens_per_page
        count = -(-kwargs["max_length_k"][allocator.layer_type] // size)
        first = torch.arange(count, device=ends.device) * size
        at = (ends[:-1, None] + first).clamp_max(of_keys.numel() - 1)
        there = first < ends.diff()[:, None]
        return torch.where(there, of_keys[at] // size, -1).int()

    def copy(self, copied: dict[str, tuple[list[int], list[int]]]) -> None:
        """Copy blocks, as a request is forked, with their scales."""
        type(self.cache).perform_cache_copy(self.cache, copied)
        for name, (sources, targets) in copied.items():
            if not sources:
                continue
            each = 2 * self.cache.cache_allocators[name].pages_per_block
            blocks = self.scales.view(-1, each, self.scales.shape[1])
            where = self.scales.device
            source, target = (torch.tensor(x, device=where) for x in (sources, targets))
            blocks[target] = blocks[source]


def eight_bit_cache(
    made: Any,  # noqa: ANN401
    eight: torch.dtype,
    is_ours: Callable[[], bool],
    *given: Any,  # noqa: ANN401
    **others: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Make a cache of continuous batching that holds 8 bits.

    Its memory is reckoned for keys and values that are read back into buffers of their own, which
    pages that are read in place do not need: more than their scales take.

    Args:
        made: the class of transformers.
        eight: what it shall hold.
        is_ours: whether the model's attention is ours.
        given: what transformers gives it.
        others: likewise, by name; its own dtype among them.

    Raises:
        UnsupportedInputError: layers that are not of full attention, or blocks that move to the
            host's memory, where scales would be lost.
    """
    wishes = others.get("continuous_batching_config")
    offloaded = getattr(wishes, "cpu_offload_space", 0.0)
    if offloaded != 0.0:
        raise UnsupportedInputError(
            f"cpu_offload_space is {offloaded}; 8-bit caches stay on the device: "
            "set it to 0, or open continuous_batching with cache='auto'"
        )
    cache = made(*given, **(others | {"dtype": eight}))
    if list(cache.cache_allocators) != [FULL]:
        raise UnsupportedInputError(
            f"the model has layers of {', '.join(sorted(cache.cache_allocators))}; 8-bit caches "
            f"are of {FULL} alone: open continuous_batching with cache='auto'"
        )
    allocator = cache.cache_allocators[FULL]
    rows = 2 * allocator.cache_tensor.shape[0] // allocator.tokens_per_page
    heads = allocator.num_key_value_heads
    pages = EightBitPages(cache, torch.zeros(rows, heads, device=cache.device), is_ours)
    cache.update, cache.perform_cache_copy = torch.compiler.disable(pages.update), pages.copy
    return cache


def check_release() -> None:
    """See that the installed transformers has caches that can hold 8 bits.

    Raises:
        PatchError: it has not.
    """
    try:
        importlib.import_module(f"{CACHE}_allocators")
    except ImportError:
        version = importlib.import_module("transformers").__version__
        raise PatchError(
            f"transformers {version} has no caches that can hold 8 bits: install one whose "
            "continuous batching has cache_allocators (5.24 was tried), or leave cache='auto'"
        ) from None
