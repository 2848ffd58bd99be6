"""How calls of paged attention are recorded: those of a server's layers, and direct ones.

Lengths and page table are saved as they are, with pages numbered anew. What the pages hold is saved
where it fits; else its mean and deviation, of each head and channel over the keys that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from sage_plugin.capture.ops.linear import CallNumbers, spread_rows
from sage_plugin.capture.ops.op import (
    GRAPH_CAPTURE,
    Extracted,
    Listener,
    Listening,
    in_graph_capture,
)
from sage_plugin.capture.record import PagedCapture
from sage_plugin.capture.selection.options import CaptureOptions
from sage_plugin.kernels.paged_attention.api import observers
from sage_plugin.kernels.paged_attention.call import PagedCall
from sage_plugin.kernels.paged_attention.gathered import gathered
from sage_plugin.kernels.paged_attention.validate import EIGHT_BITS, checked_call
from sage_plugin.paged_records import PAGED_ATTENTION, PagedShape
from sage_plugin.plugin.component import Component
from sage_plugin.plugin.steps.forward import Forward
from sage_plugin.plugin.twin import layer_of

SUFFIX = f".{PAGED_ATTENTION}"
"""How layers are named, after the attention module that calls, or the component in other calls; the
module alone is a layer of attention."""


@dataclass(frozen=True, slots=True)
class PagedEvent:
    """One call of paged attention, before it runs.

    Attributes:
        component: name of the component.
        layer: path of the attention module with the component in front, and `SUFFIX`.
        call_index: which call of the layer in the current forward, from 0.
        call: its arguments.
    """

    family: ClassVar[str] = PAGED_ATTENTION

    component: str
    layer: str
    call_index: int
    call: PagedCall


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """The call in canonical form.

    Attributes:
        call: its arguments.
        table: its page table in host memory, as wide as its longest sequence needs.
        reads: which entries of that are read.
        shape: the call, without rows behind the last sequence.
    """

    call: PagedCall
    table: torch.Tensor
    reads: torch.Tensor
    shape: PagedShape


@dataclass(frozen=True, slots=True)
class PageRule:
    """How to choose what is saved of a call.

    Attributes:
        cap_bytes: limit of one capture.
        rows: most rows of Q.
    """

    cap_bytes: int
    rows: int

    def choose(self, inputs: PagedInputs) -> tuple[int, bool] | str:
        """Return how many rows are saved and whether pages are, or why nothing can be."""
        call, shape = inputs.call, inputs.shape
        page = call.k_cache[:1].numel() * call.k_cache.element_size()
        pages = 2 * page * int(inputs.table[inputs.reads].unique().numel())
        least = 4 * inputs.table.numel() + 16 * shape.heads_k * shape.head_dim
        each = shape.heads_q * shape.head_dim * call.q.element_size()
        count = min(shape.tokens, self.rows, (self.cap_bytes - least) // each)
        if count < 1:
            return f"larger than the {self.cap_bytes} bytes that the budget leaves for one capture"
        return count, pages <= self.cap_bytes - least - count * each


@dataclass(frozen=True, slots=True)
class _Observer:
    """An observer that tells a listener of the calls of a recorded handle's components."""

    part: Component
    numbers: CallNumbers
    listener: Listener

    def __call__(self, call: PagedCall, caller: object) -> None:
        layer = layer_of(caller)
        state = self.part.state if layer is None else layer.state
        if state.owner is None or state.owner.handle is not self.part.handle:
            return
        name = f"{state.component if layer is None else layer.name}{SUFFIX}"
        self.listener(PagedEvent(state.component, name, self.numbers.next(name), call))

    def remove(self) -> None:
        """Observe no more."""
        if self in observers:
            observers.remove(self)


class PagedAttentionOp:
    """Paged attention, as `capture.ops.op.CapturedOp`."""

    record = PagedCapture
    layers_word = "attention layers"
    short = "keys"

    def layers(self, part: Component) -> list[str]:
        """Return what calls of the patched layers are named."""
        return [f"{layer.name}{SUFFIX}" for layer in part.layers.values()]

    def watch(self, part: Component, listener: Listener) -> Iterable[Listening]:
        """Observe the calls of this process, once for all components of a handle."""
        for one in observers:
            known = isinstance(one, _Observer) and one.part.handle is part.handle
            if known and one.listener == listener:  # type: ignore[attr-defined]
                return ()
        observer = _Observer(part, CallNumbers(part), listener)
        observers.append(observer)
        return (observer,)

    def canonical(self, event: PagedEvent) -> PagedInputs | str:
        """Return lengths and pages of a call, or the reason why it cannot be recorded."""
        call = event.call
        if type(call.q) is not torch.Tensor or call.q.device.type == "meta":
            return "tensor subclass"
        if in_graph_capture():
            return GRAPH_CAPTURE
        numbers = checked_call(call)
        plain = call.is_causal and numbers.left < 0 and not numbers.softcap and call.sinks is None
        if not plain:
            return "a window, a soft cap, sinks, or no causality"
        ends, lens, table = (
            x.cpu().long() for x in (call.cu_q_lens, call.kv_lens, call.page_table)
        )
        rows, size = ends.diff(), call.k_cache.shape[1]
        lengths = torch.cat((rows, lens, call.max_keys - lens, call.q.shape[0] - ends, -ends[:1]))
        if bool((lengths < 0).any()):
            return "lengths beyond the tensors"
        if min(int(ends[-1]), int(lens.sum())) == 0:
            return "no rows or no keys"
        table = table[:, : -(-int(lens.max()) // size)]
        reads = torch.arange(table.shape[1]) * size < lens[:, None]
        of_reads = table[reads]
        if bool(((of_reads < 0) | (of_reads >= call.k_cache.shape[0])).any()):
            return "keys in pages that the cache does not have"
        dtype, cache = (str(x.dtype).removeprefix("torch.") for x in (call.q, call.k_cache))
        shape = PagedShape(
            tuple(rows.tolist()), tuple(lens.tolist()), call.q.shape[1], call.k_cache.shape[2],
            call.q.shape[2], dtype, cache, size, call.max_keys,
        )  # fmt: skip
        return PagedInputs(call, table, reads, shape)

    def length(self, inputs: PagedInputs) -> int:
        """Return the keys of the longest sequence."""
        return max(inputs.shape.kv_lens)

    def counted(self, inputs: PagedInputs) -> PagedShape:
        """Return a call of its key: as many rows, and sequences of one length, a power of two."""
        shape = inputs.shape
        count, keys = len(shape.kv_lens), sum(shape.kv_lens)
        mean = min(shape.max_keys, 1 << max(0, -(-keys // count) - 1).bit_length())
        rows = (shape.tokens, *(0,) * (count - 1))
        return PagedShape(
            rows, (mean,) * count, shape.heads_q, shape.heads_k, shape.head_dim, shape.dtype,
            shape.cache_dtype, shape.page_size, shape.max_keys,
        )  # fmt: skip

    def chooser(self, options: CaptureOptions) -> Callable[[PagedInputs], tuple[int, bool] | str]:
        """Return what chooses rows, and whether pages are saved."""
        return PageRule(options.share, options.rows).choose

    def extract(
        self, event: PagedEvent, inputs: PagedInputs, part: tuple[int, bool], forward: Forward
    ) -> Extracted:
        """Copy evenly spread rows to host memory, and the pages or what is known of them."""
        (count, whole), call, total = part, inputs.call, inputs.shape.tokens
        used, numbers = inputs.table[inputs.reads].unique(return_inverse=True)
        table = torch.full(inputs.table.shape, -1, dtype=torch.int32)
        table[inputs.reads] = numbers.int()
        rows = spread_rows(count, total, call.q.device)
        tensors = {"q": call.q[rows].cpu(), "page_table": table}
        tensors |= _pages(call, used.to(call.q.device)) if whole else _moments(call, inputs.shape)
        fields = {
            "rows": count,
            "pages": len(used),
            "holds_pages": whole,
            "scale": checked_call(call).scale,
        }
        return Extracted(tensors, fields)


def _pages(call: PagedCall, used: torch.Tensor) -> dict[str, torch.Tensor]:
    """The pages that a call reads, and their scales where the caches have 8 bits."""
    tensors = {"k_cache": call.k_cache[used].cpu(), "v_cache": call.v_cache[used].cpu()}
    if call.k_cache.dtype in EIGHT_BITS:
        ones = torch.ones(len(used), call.k_cache.shape[2])
        for name, scale in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
            tensors[name] = ones.clone() if scale is None else scale[used].cpu()
    return {name: one.contiguous() for name, one in tensors.items()}


def _moments(call: PagedCall, shape: PagedShape) -> dict[str, torch.Tensor]:
    """Mean and deviation of keys and values, `(2, Hk, D)` each, over all keys that are read."""
    sums = torch.zeros(2, 2, shape.heads_k, shape.head_dim, dtype=torch.float64)
    for s, length in enumerate(shape.kv_lens):
        if not length:
            continue
        keys = gathered(call, s, length)
        for own, x, scale in ((sums[0], keys.k, keys.k_scale), (sums[1], keys.v, keys.v_scale)):
            wide = x.double() * scale[..., None].double()
            own += torch.stack((wide.sum(1), wide.square().sum(1))).cpu()
    mean, square = (sums / sum(shape.kv_lens)).unbind(1)
    moments = torch.stack((mean, (square - mean.square()).clamp_min(0).sqrt()), 1).float()
    return {"k_moments": moments[0].contiguous(), "v_moments": moments[1].contiguous()}
