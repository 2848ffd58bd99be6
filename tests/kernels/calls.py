"""Inputs of attention calls for tests: shapes, a K bias as models have it, and error measures."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sage_plugin.kernels.support import TRITON_KERNELS
from sage_plugin.schema import LaunchConfig

QUANTIZED = ("sage", "fav3_sage", "fav3_fp8")
EMULATED = ("fav2", *QUANTIZED)
HOPPER = tuple(kernel for kernel, variants in TRITON_KERNELS.items() if "hopper" in variants)
"""The kernels with a Gluon variant."""
FP8_WEIGHTS = ("fav3_sage", "fav3_fp8")

LIMITS = {"fav2": 2e-3, "sage": 8e-3, "fav3_sage": 0.03, "fav3_fp8": 0.05}
"""Largest relative L1 error against the oracle on these small, nearly zero-mean inputs."""


@dataclass(frozen=True)
class Shape:
    """Batch, heads and lengths of a call."""

    batch: int = 1
    heads_q: int = 2
    heads_k: int = 2
    seq_q: int = 100
    seq_k: int = 100
    dim: int = 64

    def __str__(self) -> str:
        return f"{self.batch}x{self.heads_q}:{self.heads_k}x{self.seq_q}:{self.seq_k}x{self.dim}"


def draw(
    shape: Shape, dtype: torch.dtype = torch.float32, *, layout: str = "bhsd", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K with a bias of each channel, and V with a mean."""
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int, seq: int) -> torch.Tensor:
        x = torch.randn(shape.batch, heads, seq, shape.dim, generator=generator)
        return x if layout == "bhsd" else x.transpose(1, 2).contiguous()

    q, k, v = (
        normal(shape.heads_q, shape.seq_q),
        normal(shape.heads_k, shape.seq_k),
        normal(shape.heads_k, shape.seq_k),
    )
    k = k + 3.0 * torch.randn(shape.dim, generator=generator)
    return q.to(dtype), k.to(dtype), (v + 0.5).to(dtype)


def launch(block_m: int = 64, block_n: int = 32, **fields: object) -> LaunchConfig:
    """A small launch config."""
    base = {
        "num_warps": 4,
        "num_stages": 2,
        "loads": "pointer",
        "smooth_k": True,
        "smooth_v": True,
        "pv_flush": 1,
    }
    return LaunchConfig.from_json({"block_m": block_m, "block_n": block_n, **base, **fields})


def hopper_launch(block_m: int = 192, block_n: int = 128, **fields: object) -> LaunchConfig:
    """A launch config of the Hopper variant: one warp to 16 rows."""
    base = {"num_warps": block_m // 16, "num_stages": 3, "loads": "descriptor", "pv_flush": 8}
    return launch(block_m, block_n, **(base | fields))


def relative_l1(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Sum of absolute errors over the sum of absolute reference values."""
    error = (out.double() - reference.double()).abs().sum()
    return (error / reference.double().abs().sum()).item()
