"""The emulation of paged attention, in plain torch: a sequence at a time, its pages gathered."""

from __future__ import annotations

from itertools import pairwise

import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention.backends.emulation.online_softmax import blockwise, finished
from sage_plugin.kernels.attention.backends.emulation.scores import ScoreRules
from sage_plugin.kernels.contract import AttentionParams
from sage_plugin.kernels.launch_graph import Outputs
from sage_plugin.kernels.paged_attention.call import PagedCall
from sage_plugin.kernels.paged_attention.gathered import GatheredKeys, gathered
from sage_plugin.kernels.paged_attention.validate import EIGHT_BITS, PagedNumbers, largest_of
from sage_plugin.kernels.quantize.emulation import round_to
from sage_plugin.kernels.quantize.recipe import LOG2E
from sage_plugin.paged_records import PagedLaunch


class PagedEmulation:
    """Computes what the Triton kernels do, cast by cast and step by step."""

    def __init__(self, kernel: str, numbers: PagedNumbers, launch: PagedLaunch) -> None:
        self._kernel, self._numbers, self._launch = kernel, numbers, launch

    def run(self, call: PagedCall) -> Outputs:
        """Run a call; reads its lengths and page table on the host.

        Raises:
            UnsupportedInputError: lengths that do not fit the tensors.
        """
        ends, lens = _checked_lengths(call)
        q = call.q
        out = torch.zeros(q.shape, dtype=call.out_dtype or q.dtype, device=q.device)
        lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, device=q.device)
        if call.sinks is not None:
            lse[:] = call.sinks.float()[:, None]
        for s, (first, end) in enumerate(pairwise(ends)):
            if end > first:
                part, norm = self._sequence(q[first:end], gathered(call, s, lens[s]), call.sinks)
                out[first:end] = part.transpose(0, 1)
                lse[:, first:end] = norm
        return out, (lse if call.return_lse else None)

    def _sequence(
        self, q: torch.Tensor, keys: GatheredKeys, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(Hq, n, D)` and the LSE `(Hq, n)` of one sequence."""
        numbers, n = self._numbers, self._launch.block_n
        tokens, heads_q, dim = q.shape
        heads_k, seq_k = keys.k.shape[0], keys.k.shape[1]
        rows = q.transpose(0, 1).reshape(heads_k, -1, dim)
        rows, factor = self._quantized(rows, keys.k.dtype)
        k, v = (x[None].float() for x in (keys.k, keys.v))
        bad = ~(k.isfinite().all(-1) & v.isfinite().all(-1) & keys.k_scale.isfinite()
                & keys.v_scale.isfinite())  # fmt: skip
        k, v = (x.masked_fill(bad[..., None], 0.0) for x in (k, v))
        k_scale, v_scale = (x[None].masked_fill(bad, 0.0) for x in (keys.k_scale, keys.v_scale))
        problem = AttentionParams(
            numbers.scale, numbers.right == 0, "bhsd", keys.there[None, None, None],
            (numbers.left, numbers.right), numbers.softcap,
        )  # fmt: skip
        rules = ScoreRules(problem, tokens, keys.length, n, poison=bad)
        eight = keys.k.dtype in EIGHT_BITS

        def block(x: torch.Tensor, j: int) -> torch.Tensor:
            return x[:, :, j * n : (j + 1) * n]

        def scores(j: int) -> torch.Tensor:
            qk = rows @ block(k, j).transpose(-1, -2) * factor[..., None]
            return rules.applied(qk * block(k_scale, j)[:, :, None] * (numbers.scale * LOG2E), j)

        def unit(j: int) -> torch.Tensor:
            top = block(v_scale, j).amax(-1, keepdim=True)
            return torch.where(top > 0, top, 1.0)

        def weigh(x: torch.Tensor, j: int) -> tuple[torch.Tensor, torch.Tensor]:
            p = torch.exp2(x)
            scaled = p * (block(v_scale, j) / unit(j))[:, :, None]
            return round_to(scaled, torch.float16 if eight else keys.v.dtype).float(), p

        sums = blockwise(
            scores, lambda j: block(v, j) * unit(j)[..., None], blocks=-(-seq_k // n), weigh=weigh
        )
        out, lse = finished(sums.mean(), sums.lse2(), sinks, heads_q=heads_q, seq_q=tokens)
        return out[0], lse[0]

    def _quantized(
        self, rows: torch.Tensor, cache: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows as the first product takes them, in fp32, and the factors of their scores."""
        wide = rows.float()[None]
        if cache not in EIGHT_BITS:
            return wide, torch.ones_like(wide[..., 0])
        limit = q_limit(self._kernel, cache)
        bad = ~wide.isfinite().all(-1)
        top = wide.abs().amax(-1)
        unit = torch.where((top > 0) & ~bad, top, 1.0) / limit
        scaled = (wide / unit[..., None]).masked_fill(bad[..., None], 0.0)
        unit = unit.masked_fill(bad, torch.nan)
        if self._kernel == "fav2":
            return round_to(scaled, torch.float16).float(), unit
        if cache == torch.int8:
            return scaled.round(), unit
        return round_to(scaled, cache).float(), unit


def q_limit(kernel: str, cache: torch.dtype) -> float:
    """Return the value that the largest magnitude of a row of Q is mapped to."""
    return 1.0 if kernel == "fav2" else largest_of(cache)


def _checked_lengths(call: PagedCall) -> tuple[list[int], list[int]]:
    """Cumulative query lengths and key lengths."""
    ends, lens = call.cu_q_lens.tolist(), call.kv_lens.tolist()
    if ends[0] != 0 or any(b < a for a, b in pairwise(ends)) or ends[-1] > call.q.shape[0]:
        raise UnsupportedInputError(
            f"cu_q_lens is {ends}; it needs to rise from 0 to the {call.q.shape[0]} rows of q"
        )
    if lens and not 0 <= min(lens) <= max(lens) <= call.max_keys:
        raise UnsupportedInputError(
            f"kv_lens is {lens}; page_table has place for 0 to {call.max_keys} keys"
        )
    return ends, lens
