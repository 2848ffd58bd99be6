"""The keys and values of one sequence, taken out of their pages."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sage_plugin.kernels.paged_attention.call import PagedCall


class GatheredKeys(NamedTuple):
    """What one sequence has in the caches, at least one key of padding.

    Attributes:
        k: `(Hk, S, D)` in the cache's dtype; v likewise.
        v: values.
        k_scale: `(Hk, S)` fp32, 1 where the caches have no scales; v_scale likewise.
        v_scale: scales of values.
        there: `(S,)` bool, whether a key's page exists.
        length: keys that the sequence has.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    there: torch.Tensor
    length: int


def gathered(call: PagedCall, s: int, length: int) -> GatheredKeys:
    """Gather the keys of a sequence; those of pages that do not exist are 0.

    Args:
        call: the call.
        s: number of the sequence.
        length: its keys.
    """
    pages, size = call.k_cache.shape[:2]
    of_keys = torch.arange(length, device=call.q.device)
    ids = call.page_table[s][of_keys // size].long()
    there = (ids >= 0) & (ids < pages)
    ids = torch.where(there, ids, 0)

    def rows(cache: torch.Tensor) -> torch.Tensor:
        found = cache[ids, of_keys % size] if pages else cache.new_zeros((length, *cache.shape[2:]))
        found = torch.where(there[:, None, None], found, torch.zeros_like(found))
        padding = found.new_zeros((0 if length else 1, *found.shape[1:]))
        return torch.cat((found, padding)).transpose(0, 1)

    def scales(given: torch.Tensor | None) -> torch.Tensor:
        if given is None:
            return torch.ones((call.k_cache.shape[2], max(1, length)), device=call.q.device)
        found = (
            torch.where(there[:, None], given[ids], 0.0)
            if pages
            else given.new_zeros((length, given.shape[1]))
        )
        return torch.cat((found, found.new_zeros((0 if length else 1, found.shape[1])))).t()

    if not length:
        there = there.new_zeros(1)
    return GatheredKeys(
        rows(call.k_cache), rows(call.v_cache), scales(call.k_scale), scales(call.v_scale), there,
        length,
    )  # fmt: skip
