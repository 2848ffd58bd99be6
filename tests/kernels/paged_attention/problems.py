"""Drawn calls of paged attention, NaN around their sequences, and the truth."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import torch

from sage_plugin.kernels.paged_attention.dispatch import BITS
from sage_plugin.paged_records import PAGED_KERNELS

EIGHT = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True)
class Problem:
    """A call to draw.

    Attributes:
        lens: keys of each sequence; rows: its queries.
        padding: rows of Q behind the last sequence.
        missing: places in the page table, sequence and entry, that hold no page.
        shared: whether all sequences begin with the same page.
        scaled: whether an FP8 cache has scales.
        options: arguments of the call beside its tensors.
    """

    lens: tuple[int, ...] = (37, 5, 0, 64)
    rows: tuple[int, ...] = (1, 5, 1, 1)
    heads_q: int = 4
    heads_k: int = 2
    head_dim: int = 64
    page: int = 16
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    integers: torch.dtype = torch.int32
    padding: int = 0
    missing: tuple[tuple[int, int, int], ...] = ()
    shared: bool = False
    scaled: bool = True
    sinks: bool = False
    device: str = "cpu"
    options: dict[str, object] = field(default_factory=dict)

    def but(self, **changes: object) -> Problem:
        """The problem with changes."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Drawn:
    """A drawn call: `args` and `kwargs` of `paged_attention`, and its output and LSE in fp64."""

    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, object]
    out: torch.Tensor
    lse: torch.Tensor


def draw(problem: Problem, seed: int = 0) -> Drawn:
    """Draw a call; what lies outside of its sequences is NaN, or as large as the type has it."""
    rng = torch.Generator().manual_seed(seed)
    p, dim, page = problem, problem.head_dim, problem.page
    counts = [-(-n // page) for n in p.lens]
    width, pages = max(1, *counts) + 1, sum(counts) + 3
    order = torch.randperm(pages, generator=rng).tolist()
    table = torch.full((len(p.lens), width), pages + 7)
    keys = torch.randn(2, pages, page, p.heads_k, dim, generator=rng)
    keys[0] *= torch.rand(pages, 1, p.heads_k, 1, generator=rng) * 2 + 0.2
    mine = torch.zeros(pages, page, dtype=torch.bool)
    for s, count in enumerate(counts):
        own = [order.pop() for _ in range(count)]
        if p.shared and count:
            own[0] = int(table[0, 0]) if s else own[0]
        table[s, :count] = torch.tensor(own, dtype=table.dtype)
        for entry, number in enumerate(own):
            mine[number, : max(0, min(page, p.lens[s] - entry * page))] = True
    for s, entry, number in p.missing:
        table[s, entry] = number
    cache = p.cache or p.dtype
    scales = {}
    if cache in EIGHT:
        top = keys.abs().amax((2, 4)).clamp_min(1e-6) / EIGHT[cache]
        if not p.scaled:
            top = torch.ones_like(top)
        held = keys / top[:, :, None, :, None]
        held = held.round().to(cache) if cache == torch.int8 else held.to(cache)
        exact = held.double() * top.double()[:, :, None, :, None]
        if p.scaled:
            top = top.masked_fill(~mine.any(1)[None, :, None], math.nan)
            scales = {"k_scale": top[0].contiguous(), "v_scale": top[1].contiguous()}
    else:
        held = keys.to(cache)
        exact = held.double()
    held = poisoned(held, mine)
    q = torch.randn(sum(p.rows) + p.padding, p.heads_q, dim, generator=rng).to(p.dtype)
    sinks = torch.randn(p.heads_q, generator=rng) if p.sinks else None
    ends = torch.tensor([0, *torch.tensor(p.rows).cumsum(0).tolist()])
    tensors = (
        q, held[0], held[1], table.to(p.integers), torch.tensor(p.lens).to(p.integers),
        ends.to(p.integers),
    )  # fmt: skip
    out, lse = _exact(p, q.double(), exact, table, sinks)
    kwargs: dict[str, object] = {**scales, **p.options}
    if sinks is not None:
        kwargs["sinks"] = sinks
    on = {name: x.to(p.device) if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
    return Drawn(tuple(x.to(p.device) for x in tensors), on, out.to(p.device), lse.to(p.device))


def poisoned(caches: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Fill what is no sequence's."""
    caches = caches.clone()
    if caches.dtype == torch.int8:
        caches[:, ~mine] = -128
    elif caches.element_size() == 1:
        caches.view(torch.uint8)[:, ~mine] = 0x7F
    else:
        caches[:, ~mine] = math.nan
    return caches


def _exact(
    p: Problem, q: torch.Tensor, keys: torch.Tensor, table: torch.Tensor,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The definition, one row at a time."""
    out = torch.zeros_like(q)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64)
    if sinks is not None:
        lse[:] = sinks.double()[:, None]
    options = {"scale": p.head_dim**-0.5, "is_causal": True, "window": None, "softcap": 0.0}
    options |= p.options
    left, right = options["window"] or (-1, -1)
    right = 0 if options["is_causal"] else right
    row = -1
    for s, (length, rows) in enumerate(zip(p.lens, p.rows, strict=True)):
        for token in range(rows):
            row += 1
            own = length - rows + token
            seen = [
                (int(table[s, n // p.page]), n % p.page)
                for n in range(length)
                if 0 <= table[s, n // p.page] < keys.shape[1]
                and (right < 0 or n <= own + right)
                and (left < 0 or n >= own - left)
            ]
            if not seen:
                continue
            at = torch.tensor(seen)
            k, v = (
                x[at[:, 0], at[:, 1]].repeat_interleave(p.heads_q // p.heads_k, 1) for x in keys
            )
            score = torch.einsum("hd,nhd->hn", q[row], k) * options["scale"]
            if cap := options["softcap"]:
                score = cap * torch.tanh(score / cap)
            total = torch.logsumexp(score, 1)
            if sinks is not None:
                total = torch.logaddexp(total, sinks.double())
            out[row] = torch.einsum("hn,nhd->hd", torch.exp(score - total[:, None]), v)
            lse[:, row] = total
    return out, lse


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error of an output; infinite where it is not finite."""
    difference = (out.double() - exact).norm() / exact.norm().clamp_min(1e-12)
    return float(difference.nan_to_num(math.inf))


DECODE = Problem()
RAGGED = Problem(lens=(42, 9, 0, 19), rows=(21, 1, 2, 7), padding=3)

ROWS = {
    "decode": DECODE,
    "ragged": RAGGED,
    "prefill": Problem(lens=(50,), rows=(50,)),
    "chunk": Problem(lens=(90,), rows=(20,)),
    "more rows than keys": Problem(lens=(3, 40), rows=(9, 2)),
    "all see all": RAGGED.but(options={"is_causal": False}),
    "window": RAGGED.but(options={"window": (11, 0)}),
    "both sides": RAGGED.but(options={"window": (9, 4), "is_causal": False}),
    "cap and scale": RAGGED.but(options={"softcap": 2.0, "scale": 0.31}),
    "sinks": RAGGED.but(sinks=True),
    "pages missing": RAGGED.but(missing=((0, 1, -1), (3, 0, 1 << 20))),
    "shared pages": RAGGED.but(shared=True),
    "long pages": RAGGED.but(page=64),
    "odd pages": RAGGED.but(page=24),
    "long integers": DECODE.but(integers=torch.int64),
    "odd heads": RAGGED.but(head_dim=80, heads_q=6),
    "many heads": DECODE.but(heads_q=34, heads_k=2),
    "bf16": RAGGED.but(dtype=torch.bfloat16),
    "fp16": DECODE.but(dtype=torch.float16, head_dim=128),
    "int8": RAGGED.but(dtype=torch.bfloat16, cache=torch.int8),
    "int8 long pages": RAGGED.but(dtype=torch.bfloat16, cache=torch.int8, page=64),
    "fp8": RAGGED.but(dtype=torch.bfloat16, cache=torch.float8_e4m3fn),
    "fp8 without scales": DECODE.but(dtype=torch.bfloat16, cache=torch.float8_e4m3fn, scaled=False),
    "fp8 missing": RAGGED.but(
        dtype=torch.bfloat16, cache=torch.float8_e4m3fn, missing=((0, 1, -1), (3, 1, 9999))
    ),
}
"""Features of a call, each of which every kernel answers as the definition in fp64 does."""

CASES = [
    (name, kernel)
    for name, problem in ROWS.items()
    for kernel in PAGED_KERNELS
    if (problem.cache or problem.dtype) in BITS.get(kernel, (problem.cache or problem.dtype,))
]
"""Each feature with the kernels that know its cache."""


def tolerance(problem: Problem, kernel: str) -> float:
    """The relative error that a right answer may have."""
    if kernel != "fav2":
        return 0.04 if problem.cache == torch.float8_e4m3fn else 0.012
    return {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}[problem.dtype]
