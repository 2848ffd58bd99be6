"""Launch configs of products: data only, read from the top; they import without Triton.

Those of hardware that was not at hand are the tiles that spill nothing (`make compile-matrix`).
"""

from __future__ import annotations

from sage_plugin.kernels.search_space import Axes, Region
from sage_plugin.schema import LinearLaunch

ANY_ROWS = 1 << 62
TILE = ("block_m", "block_n", "block_k", "num_warps")
"""What tiles are."""


def tile(m: int, n: int, k: int, warps: int, stages: int, **more: int | str) -> LinearLaunch:
    """Return the launch config of a tile."""
    return LinearLaunch(block_m=m, block_n=n, block_k=k, num_warps=warps, num_stages=stages, **more)  # type: ignore[arg-type]


FEW = 64
TMA: dict[str, int | str] = {"loads": "descriptor", "programs": 1, "group_m": 16}
LARGE_TILES = (
    (128, 256, 128, 8), (128, 128, 128, 8), (128, 128, 128, 4), (256, 128, 128, 8),
    (128, 256, 64, 8), (64, 256, 128, 4),
)  # fmt: skip
HOPPER_TILES = ((64, 64, 128, 4), (64, 32, 128, 4), (64, 64, 256, 4), (64, 128, 128, 4))
SMALL_TILES = ((16, 64, 128, 4), (32, 64, 128, 4), (64, 64, 128, 4), (16, 128, 256, 4))
AMD_TILES = ((128, 128, 64, 4), (128, 128, 64, 8), (64, 128, 64, 4), (64, 64, 128, 4))
RDNA_TILES = ((64, 64, 64, 4), (64, 128, 32, 8), (32, 64, 64, 4))
NVIDIA_AXES: Axes = {"num_stages": (2, 3, 4), "group_m": (4, 8, 16)}
TMA_AXES: Axes = {"num_stages": (3, 4), "group_m": (4, 8, 16)}
AMD_AXES: Axes = {"num_stages": (1, 2), "waves_per_eu": (0, 2)}

REGIONS = (
    Region("emulation", ANY_ROWS, tile(128, 128, 128, 8, 2)),
    # Fewer than 64 rows are no `wgmma`, and FP8 ones become products of fp16.
    Region("sm_90", FEW, tile(64, 64, 128, 4, 4), HOPPER_TILES, NVIDIA_AXES),
    Region("sm_90", ANY_ROWS, tile(128, 256, 128, 8, 3, **TMA), LARGE_TILES, TMA_AXES),
    Region("sm_10*", FEW, tile(64, 64, 128, 4, 3), SMALL_TILES, NVIDIA_AXES),
    Region("sm_10*", ANY_ROWS, tile(128, 128, 128, 8, 3), LARGE_TILES, NVIDIA_AXES),
    Region("sm_8[07]", FEW, tile(16, 64, 128, 4, 4), SMALL_TILES, NVIDIA_AXES),
    Region("sm_8[07]", ANY_ROWS, tile(128, 256, 64, 8, 4), LARGE_TILES, NVIDIA_AXES),
    Region("sm_*", FEW, tile(16, 64, 128, 4, 3), SMALL_TILES, NVIDIA_AXES),
    Region("sm_*", ANY_ROWS, tile(128, 128, 128, 8, 3), LARGE_TILES, NVIDIA_AXES),
    Region("gfx1*", FEW, tile(16, 64, 64, 4, 1), RDNA_TILES, AMD_AXES),
    Region("gfx1*", ANY_ROWS, tile(64, 64, 64, 4, 1), RDNA_TILES, AMD_AXES),
    Region("gfx*", FEW, tile(16, 64, 128, 4, 1), AMD_TILES, AMD_AXES),
    Region("gfx*", ANY_ROWS, tile(128, 128, 64, 4, 2), AMD_TILES, AMD_AXES),
)
