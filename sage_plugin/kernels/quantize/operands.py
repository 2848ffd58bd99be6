"""What the Triton quantisers make of Q, K and V, and how large it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sage_plugin.kernels.contract import AttentionParams, OutputForm
from sage_plugin.kernels.quantize.recipe import Recipe
from sage_plugin.schema import LaunchConfig


@dataclass(frozen=True, slots=True)
class QuantizedOperands:
    """Quantised Q, K and V on a GPU, with the blocks that they were quantised by.

    Attributes:
        q8: `(B*Hq, q_rows, DP)`.
        k8: `(B*Hk, k_rows, DP)`.
        v8: `(B*Hk, k_rows, DP)` fp16 or `(B*Hk, DP, k_rows)` FP8.
        q_scale: `(B*Hq, q_rows)` fp32.
        k_scale: `(B*Hk, k_rows / block_n)` fp32, NaN where the block has a key that is not finite.
        k_scale_finite: the same as if it had none.
        key_term: `(B*Hk, k_rows)` fp32, what a key adds to every score in log2 units.
        v_scale: `(B*Hk, DP)` fp32; v_mean likewise.
        v_mean: what was subtracted from V.
        v_residual: `(B*Hk, DP)` int32, sum of what FP8 V gained by rounding; broad weights would
            carry its mean into every row. In units of `v_unit`, `(B*Hk, DP)` fp32, per key.
        v_drifts: `(B*Hk,)` int32, 1 where FP8 V has a channel with a trend along the sequence.
        shift: `(B*Hq, q_rows)` fp32, q . mean(K) in log2 units; `None` where nothing of the call
            needs true scores.
        form: shape and memory order of the output.
    """

    q8: torch.Tensor
    k8: torch.Tensor
    v8: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor
    k_scale_finite: torch.Tensor
    key_term: torch.Tensor
    v_scale: torch.Tensor
    v_mean: torch.Tensor
    v_residual: torch.Tensor
    v_unit: torch.Tensor
    v_drifts: torch.Tensor
    shift: torch.Tensor | None
    form: OutputForm
    heads_q: int
    heads_k: int
    sequences: int
    seq_q: int
    seq_k: int
    head_dim: int
    v_dtype: torch.dtype
    problem: AttentionParams
    recipe: Recipe
    launch_config: LaunchConfig


def needs_shift(problem: AttentionParams, launch: LaunchConfig) -> bool:
    """Whether something of a call needs scores with what smoothing K took from them."""
    capped = problem.softcap > 0.0 or problem.sinks is not None
    return launch.smooth_k and (problem.lse or capped)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths of a call, and the padded rows of its scratch.

    Attributes:
        sequences: batch items, or packed sequences.
        planes: batch items that have scratch of their own; 1 for packed sequences.
        seq_q: longest query length.
        seq_k: longest key length.
        q_rows: scratch rows of a plane's query head.
        k_rows: scratch rows of a plane's key head.
    """

    sequences: int
    planes: int
    seq_q: int
    seq_k: int
    q_rows: int
    k_rows: int

    @classmethod
    def of(
        cls, q: torch.Tensor, k: torch.Tensor, problem: AttentionParams, launch: LaunchConfig
    ) -> Sizes:
        """Sizes of a call from Q and K in bhsd."""
        block_m, block_n = launch.block_m, launch.block_n
        seq_q, seq_k = q.shape[2], k.shape[2]
        if (packed := problem.packed) is not None:
            count = packed.cu_seqlens_q.shape[0] - 1
            q_rows = (seq_q // block_m + count) * block_m
            k_rows = (seq_k // block_n + count) * block_n
            return cls(count, 1, packed.max_seqlen_q, packed.max_seqlen_k, q_rows, k_rows)
        q_rows = -(-seq_q // block_m) * block_m
        k_rows = -(-seq_k // block_n) * block_n
        return cls(q.shape[0], q.shape[0], seq_q, seq_k, q_rows, k_rows)
