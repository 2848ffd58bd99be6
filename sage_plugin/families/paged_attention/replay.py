"""A call of paged attention on its device: judged on sampled rows, timed as a server makes it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

from sage_plugin.accuracy.output import ExactRows
from sage_plugin.capture.record import PagedCapture
from sage_plugin.capture.store.reader import CaptureFolder
from sage_plugin.errors import UsageError
from sage_plugin.families.family import ReplayCall, SplitCall
from sage_plugin.families.paged_attention import cost
from sage_plugin.kernels.attention.backends.sdpa import host_attention
from sage_plugin.kernels.contract import HOST, Decision
from sage_plugin.kernels.paged_attention.append import append_pages
from sage_plugin.kernels.paged_attention.call import PagedCall
from sage_plugin.kernels.paged_attention.executor import resolve
from sage_plugin.kernels.paged_attention.gathered import gathered
from sage_plugin.kernels.paged_attention.validate import EIGHT_BITS
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.measure.inputs import (
    DISTRIBUTIONS,
    K_CHANNEL_BIAS,
    OUTLIER_CHANNELS,
    OUTLIER_SCALE,
    torch_dtype,
)
from sage_plugin.paged_records import PagedLaunch, PagedShape
from sage_plugin.schema import DeviceFacts

JUDGED_ROWS = 64
"""Rows whose exact output is computed."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedReplay(ReplayCall):
    """Tensors of a call, as `families.family.ReplayCall`.

    Attributes:
        call: the call.
        shape: its shape.
    """

    call: PagedCall
    shape: PagedShape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its output."""
        return self.call.q.dtype

    def inputs(self) -> dict[str, torch.Tensor]:
        """Name its tensors."""
        named = zip(PagedCall._fields, self.call.tensors(), strict=False)
        return {name: given for name, given in named if given is not None}

    def full_size(self, shape: PagedShape) -> PagedReplay:
        """Return the call itself, whose lengths are all those of the full one."""
        assert shape == self.shape
        return self

    def exact(self, rows: torch.Tensor | None = None) -> ExactRows:
        """Compute rows of the output in fp64, spread over all sequences."""
        if rows is None:
            count = min(self.shape.tokens, JUDGED_ROWS)
            rows = torch.arange(count) * self.shape.tokens // count
        outs, means = zip(*(self._row(int(row)) for row in rows), strict=True)
        out, mean = (torch.stack(parts, 1)[None].float() for parts in (outs, means))
        return ExactRows(rows, out, mean)

    def _row(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The output of a row, `(Hq, D)` in fp64, and the mean of the values that it sees."""
        call, ends = self.call, [0, *accumulate(self.shape.q_lens)]
        s = next(s for s, end in enumerate(ends[1:]) if row < end)
        own = max(0, self.shape.kv_lens[s] - (ends[s + 1] - row) + 1)
        keys = gathered(call, s, own)
        k, v = (
            (x.double() * scale.double()[..., None]).repeat_interleave(call.group, 0)
            for x, scale in ((keys.k, keys.k_scale), (keys.v, keys.v_scale))
        )
        q = call.q[row].double()
        weights = (torch.einsum("hd,hnd->hn", q, k) * self._scale).softmax(-1)
        return torch.einsum("hn,hnd->hd", weights, v), v.mean(1)

    @property
    def _scale(self) -> float:
        return self.shape.head_dim**-0.5 if self.call.scale is None else self.call.scale

    def output(
        self, decision: Decision, config: PagedLaunch | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Run a kernel as `paged_attention` does, all rows as those of one batch item."""
        return self._runner(decision, config, dtype)().transpose(0, 1)[None]

    def judged_size(self) -> tuple[int, ...]:
        """Return the shape of the output, heads before rows."""
        tokens, heads, dim = self.call.q.shape
        return (1, heads, tokens, dim)

    def whole(
        self, decision: Decision | None = None, config: PagedLaunch | None = None
    ) -> Callable[[], object]:
        """Return the call, or torch's attention on keys and values that are gathered."""
        return self._runner(decision or Decision("sdpa", HOST), config, None)

    def split(
        self, decision: Decision, config: PagedLaunch | None, facts: DeviceFacts
    ) -> SplitCall:
        """Return the call, which has no part that quantizes."""
        whole = self.whole(decision, config)
        return SplitCall(whole, whole, False, cost.moved_bytes(self.shape))

    def flops(self) -> int:
        """Count its operations."""
        return cost.flops(self.shape)

    def _runner(
        self, decision: Decision, config: PagedLaunch | None, dtype: torch.dtype | None
    ) -> Callable[[], torch.Tensor]:
        call = self.call._replace(out_dtype=dtype)
        if decision.variant == HOST:
            return functools.partial(self._by_sdpa, dtype or self.dtype)
        executor = resolve(call, BackendRequest(decision.kernel, decision.variant, config))
        return lambda: executor.run(call)[0]

    def _by_sdpa(self, dtype: torch.dtype) -> torch.Tensor:
        """Torch's attention, a sequence at a time, its keys gathered and as Q's dtype has them."""
        parts, wide = [], torch.promote_types(dtype, self.dtype)
        ends = [0, *accumulate(self.shape.q_lens)]
        for s, length in enumerate(self.shape.kv_lens):
            keys = gathered(self.call, s, length)
            k, v = keys.k, keys.v
            if k.dtype in EIGHT_BITS:
                k, v = (
                    x.float() * scale[..., None]
                    for x, scale in ((k, keys.k_scale), (v, keys.v_scale))
                )
            q = self.call.q[ends[s] : ends[s + 1]].transpose(0, 1)
            q, k, v = (x[None].to(wide) for x in (q, k, v))
            out = host_attention(q, k, v, None, 0.0, True, self._scale, True)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts).to(dtype)


def drawn(
    shape: PagedShape, device: torch.device | str, seed: int = 0, distribution: str = "normal"
) -> PagedReplay:
    """Draw queries, keys and values, and write these to pages in a random order.

    `normal` is N(0, 1). `biased` adds to K a bias 3 N(0, 1) and to V one N(0, 1) of each channel,
    `drift` 1 to the first half of each sequence's V and -1 to the second, and `outlier` multiplies
    two channels of K by 40.

    Raises:
        UsageError: the distribution or a dtype is unknown.
    """
    if distribution not in DISTRIBUTIONS:
        raise UsageError(
            f"input distribution {distribution!r}: allowed are {', '.join(DISTRIBUTIONS)}"
        )
    dtype, cache = torch_dtype(shape.dtype), getattr(torch, shape.cache_dtype)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, generator=generator, dtype=torch.float32)

    page, heads, dim = shape.page_size, shape.heads_k, shape.head_dim
    counts = [-(-n // page) for n in shape.kv_lens]
    pages = max(1, sum(counts))
    order = torch.randperm(pages, device=device, generator=generator, dtype=torch.int32)
    table = torch.full((len(counts), max(1, -(-shape.max_keys // page))), -1, dtype=torch.int32)
    table = table.to(device)
    caches = [torch.zeros(pages, page, heads, dim, device=device).to(cache) for _ in range(2)]
    scales = [torch.zeros(pages, heads, device=device) if cache in EIGHT_BITS else None] * 2
    scales = [None if one is None else one.clone() for one in scales]
    bias = draw(2, heads, dim) if distribution == "biased" else torch.zeros(2, heads, dim)
    bias = bias.to(device)
    begin = 0
    for s, (length, count) in enumerate(zip(shape.kv_lens, counts, strict=True)):
        table[s, :count] = order[begin : begin + count]
        begin += count
        k, v = draw(length, heads, dim), draw(length, heads, dim)
        k, v = k + K_CHANNEL_BIAS * bias[0], v + bias[1]
        if distribution == "outlier":
            k[..., :OUTLIER_CHANNELS] *= OUTLIER_SCALE
        if distribution == "drift":
            v[: length // 2] += 1.0
            v[length // 2 :] -= 1.0
        keys = torch.tensor([length], dtype=torch.int32, device=device)
        ends = torch.tensor([0, length], dtype=torch.int32, device=device)
        append_pages(
            k.to(dtype), v.to(dtype), caches[0], caches[1], table[s : s + 1], keys, ends,
            k_scale=scales[0], v_scale=scales[1],
        )  # fmt: skip
    q = draw(shape.tokens, shape.heads_q, dim).to(dtype)
    return PagedReplay(_call(shape, q, table, *caches, *scales), shape)


def captured(
    folder: CaptureFolder, record: PagedCapture, device: torch.device | str
) -> PagedReplay:
    """Load a capture with all its lengths; rows that were not saved repeat saved ones near them.

    Pages that were not saved are drawn, each channel of a head with the mean and the deviation that
    were recorded.

    Raises:
        CaptureError: it is damaged.
    """
    tensors, shape = folder.tensors(record, device), record.shape
    rows = torch.arange(shape.tokens, device=device) * record.rows // shape.tokens
    table = tensors["page_table"]
    more = shape.max_keys // shape.page_size - table.shape[1]
    table = torch.nn.functional.pad(table, (0, more), value=-1)
    if record.holds_pages:
        names = ("k_cache", "v_cache", "k_scale", "v_scale")
        pages = [tensors.get(name) for name in names]
    else:
        pages = _drawn_pages(record, tensors["k_moments"], tensors["v_moments"])
    call = _call(shape, tensors["q"][rows], table, *pages)  # type: ignore[arg-type]
    return PagedReplay(call._replace(scale=record.scale), shape)


def _drawn_pages(record: PagedCapture, *moments: torch.Tensor) -> list[torch.Tensor | None]:
    """Caches and their scales: all pages are filled as one sequence has them one after another."""
    shape, count, device = record.shape, record.pages, moments[0].device
    cache = getattr(torch, shape.cache_dtype)
    generator = torch.Generator(device).manual_seed(int(record.sha256[:8], 16))
    total, size = count * shape.page_size, (shape.heads_k, shape.head_dim)
    drawn = (
        (mean + dev * torch.randn(total, *size, device=device, generator=generator))
        for mean, dev in moments
    )
    k, v = (one.to(torch_dtype(shape.dtype)) for one in drawn)
    caches = [torch.empty(count, shape.page_size, *size, device=device, dtype=cache) for _ in "kv"]
    scales = [
        torch.zeros(count, shape.heads_k, device=device) if cache in EIGHT_BITS else None
        for _ in "kv"
    ]
    table = torch.arange(count, dtype=torch.int32, device=device)[None]
    lens = torch.tensor([total], dtype=torch.int32, device=device)
    ends = torch.tensor([0, total], dtype=torch.int32, device=device)
    append_pages(
        k, v, caches[0], caches[1], table, lens, ends, k_scale=scales[0], v_scale=scales[1]
    )
    return [*caches, *scales]


def _call(
    shape: PagedShape,
    q: torch.Tensor,
    table: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> PagedCall:
    lens = torch.tensor(shape.kv_lens, dtype=torch.int32, device=q.device)
    ends = torch.tensor([0, *accumulate(shape.q_lens)], dtype=torch.int32, device=q.device)
    return PagedCall(q, k_cache, v_cache, table, lens, ends, None, k_scale, v_scale)


def saved_shape(record: PagedCapture) -> PagedShape:
    """Return the shape of what a capture holds of its call, which is all of it."""
    return record.shape
