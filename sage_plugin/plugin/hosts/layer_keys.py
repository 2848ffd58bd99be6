"""What transformers' continuous batching gives the attention of one layer, in two spellings.

From 5.23 on the layer writes to the cache, or hands over its pages, before attention is called.
Before that attention functions did, with the cache and indices of all layers among their arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn


class LayerKeys(NamedTuple):
    """Keys and values of a layer.

    Attributes:
        k: `(tokens, Hk, D)`: those of the new tokens where there is a table, else of all.
        v: likewise.
        ends: cumulative lengths of the keys, the new ones among them, int32.
        longest: no sequence has more queries; no sequence has more keys.
        table: pages of each sequence, `None` where keys come gathered.
        k_cache: `(pages, page size, Hk, D)`, `None` likewise.
        v_cache: likewise.
        k_scale: `(pages, Hk)` fp32 of caches in 8 bits, `None` of others.
        v_scale: likewise.
    """

    k: torch.Tensor
    v: torch.Tensor
    ends: torch.Tensor
    longest: tuple[int, int]
    table: torch.Tensor | None = None
    k_cache: Any = None
    v_cache: Any = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def layer_keys(
    module: nn.Module, key: torch.Tensor, value: torch.Tensor, others: Mapping[str, Any]
) -> LayerKeys:
    """Return what a layer attends to, written to its cache where it comes gathered.

    Args:
        module: the attention module.
        key: `(1, Hk, tokens, D)`.
        value: likewise.
        others: what else the attention function was given.
    """
    if "max_seqlen_q" in others:
        return _written_here(module, key, value, others)
    k, v = (x[0].transpose(0, 1) for x in (key, value))
    longest = (others["max_length_q"], others["max_length_k"])
    table = others.get("block_table")
    names = ("k_cache", "v_cache", "k_scale", "v_scale")
    pages = () if table is None else (table, *(others.get(name) for name in names))
    return LayerKeys(k, v, others["cu_seq_lens_k"], longest, *pages)


def _written_here(
    module: Any,  # noqa: ANN401
    key: torch.Tensor,
    value: torch.Tensor,
    others: Mapping[str, Any],
) -> LayerKeys:
    cache = others["cache"]
    ends, longest = others["cu_seq_lens_k"], others["max_seqlen_k"]
    if isinstance(ends, dict):
        sliding = bool(getattr(module, "sliding_window", None))
        kind = "sliding_attention" if sliding else "full_attention"
        ends, longest = ends[kind], longest[kind]
    ends = ends.int()
    if others.get("block_table") is None:
        indices = {name: others[name] for name in ("read_index", "write_index")}
        k, v = cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, **indices
        )
        return LayerKeys(k, v, ends, (others["max_seqlen_q"], longest))
    group, place = cache.layer_index_to_group_indices[module.layer_idx]
    k, v = (x[0].transpose(0, 1) for x in (key, value))
    size = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    caches = (cache.key_cache[place].view(size), cache.value_cache[place].view(size))
    return LayerKeys(k, v, ends, (1, 1), others["block_table"][group], *caches)
