"""Error of a kernel on a recorded call, against the oracle, on sampled rows of every head."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

import sage_plugin
from sage_plugin import device as devices
from sage_plugin.accuracy.metrics import compare
from sage_plugin.families.attention.reference import sample_rows, visible_mean
from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.attention.oracle import oracle
from sage_plugin.kernels.contract import AttentionParams
from sage_plugin.schema import CallKey, ErrorMetrics, LaunchConfig
from tests.real.captured import Captured
from tests.real.hook import Call


@dataclass(frozen=True, slots=True)
class Exact:
    """The oracle's rows of a call.

    Attributes:
        rows: sampled query rows, the same for each head.
        out: (B, Hq, R, D), fp32.
        lse: (B, Hq, R), natural log.
        v_mean: mean of V over the keys that each row sees, broadcast to `out`.
    """

    rows: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    v_mean: torch.Tensor


@functools.lru_cache(maxsize=64)
def exact(one: Captured) -> Exact:
    """The exact output of a call."""
    call = one.call
    rows = sample_rows(call.q.shape[2])
    out, lse = oracle(
        call.q, call.k, call.v, is_causal=call.causal, scale=call.scale, mask=call.mask, rows=rows
    )
    mean = visible_mean(
        call.v,
        rows,
        seq_q=call.q.shape[2],
        heads_q=call.q.shape[1],
        causal=call.causal,
        mask=call.mask,
    )
    return Exact(rows, out, lse, mean)


def problem_of(call: Call) -> AttentionParams:
    """The call without its tensors, as implementations take it."""
    scale = 1 / math.sqrt(call.q.shape[3]) if call.scale is None else call.scale
    return AttentionParams(scale, call.causal, "bhsd", call.mask)


def default_launch(one: Captured, kernel: str) -> LaunchConfig:
    """What the emulation of a kernel runs a call with where nothing was tuned."""
    q, k = one.call.q, one.call.k
    key = CallKey(
        kernel=kernel,
        variant="emulation",
        head_dim=q.shape[3],
        dv=q.shape[3],
        dtype="bfloat16",
        gqa_ratio=q.shape[1] // k.shape[1],
        causal=one.call.causal,
        mask_kind="none" if one.call.mask is None else "dense",
        layout="bhsd",
        seq_q=q.shape[2],
        seq_k=k.shape[2],
        batch_heads=q.shape[0] * q.shape[1],
    )
    return dispatch.default_launch(key, devices.facts("cpu"))


def output(
    one: Captured, kernel: str, *, launch: LaunchConfig | None = None, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel's fp32 output and LSE of a call, on the CPU."""
    call = one.call
    q, k, v = (tensor.to(device) for tensor in (call.q, call.k, call.v))
    out, lse = sage_plugin.attention(
        q,
        k,
        v,
        None if call.mask is None else call.mask.to(device),
        is_causal=call.causal,
        scale=call.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel=kernel,
        launch=launch,
        out_dtype=torch.float32,
        return_lse=True,
    )
    return out.cpu(), lse.cpu()


def errors(one: Captured, out: torch.Tensor) -> ErrorMetrics:
    """Metrics of an output of all rows."""
    reference = exact(one)
    return compare(
        out[:, :, reference.rows],
        reference.out,
        v_mean=reference.v_mean,
        rounding=one.call.v.dtype,
        bad_values=int((~torch.isfinite(out)).sum().item()),
    )


def lse_error(one: Captured, lse: torch.Tensor) -> float:
    """Largest absolute error of a natural-log LSE of all rows; infinite where it holds NaN."""
    reference = exact(one)
    difference = (lse[:, :, reference.rows] - reference.lse).abs()
    return difference.nan_to_num(nan=math.inf).max().item()
