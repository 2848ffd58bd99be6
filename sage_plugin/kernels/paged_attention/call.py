"""One call of paged attention as it comes through a door, and what is asked to compute it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sage_plugin.kernels.surroundings import wants_gradient
from sage_plugin.paged_records import PagedKey, kind_of


class PagedCall(NamedTuple):
    """The arguments of one call, as `paged_attention` documents them.

    Attributes:
        out_dtype: dtype of the output, Q's if `None`.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    kv_lens: torch.Tensor
    cu_q_lens: torch.Tensor
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    scale: float | None = None
    is_causal: bool = True
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    return_lse: bool = False
    out_dtype: torch.dtype | None = None

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return every tensor that the call reads."""
        return self[:9]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.q.device

    @property
    def sequences(self) -> int:
        """How many sequences there are."""
        return self.page_table.shape[0]

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.q.shape[1] // self.k_cache.shape[2]

    @property
    def max_keys(self) -> int:
        """Keys that a row of the page table has place for."""
        return self.page_table.shape[1] * self.k_cache.shape[1]

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient has to flow through the call."""
        return wants_gradient(self.q, self.k_cache, self.v_cache, self.sinks)

    def kind(self) -> str:
        """Return what shapes tell of the call, one of `PAGED_KINDS`."""
        return kind_of(self.q.shape[0], self.sequences)

    def key(self) -> tuple[object, ...]:
        """Return all that an answer follows from: the call without its data."""
        of_tensors = tuple(
            None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in self.tensors()
        )
        return (*of_tensors, *self[9:], self.needs_grad)

    def launch_key(self, kernel: str, backend: str, kind: str | None = None) -> PagedKey:
        """Return the key under which a launch config is looked up, of the call or of its part."""
        return PagedKey(
            kernel, backend, kind or self.kind(), self.q.shape[2], self.group, _name(self.q),
            _name(self.k_cache), self.k_cache.shape[1],
            self.sequences if kind == "decode" else self.q.shape[0], self.max_keys,
            self.sequences, self.k_cache.shape[2],
        )  # fmt: skip


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
