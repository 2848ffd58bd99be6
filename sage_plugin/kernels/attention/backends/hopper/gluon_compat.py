"""Names of Gluon that moved between releases of Triton, chosen by what is there."""

from __future__ import annotations

import triton.language.core
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""A TMA copy from global to shared memory: `async_load` since Triton 3.8."""

aggregate = getattr(gluon, "aggregate", None) or triton.language.core._aggregate
"""Makes a class of values that kernels pass on as one; public since Triton 3.9."""

__all__ = [
    "TensorDescriptor",
    "aggregate",
    "async_load",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
