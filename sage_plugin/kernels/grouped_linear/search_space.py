"""Launch configs of grouped products, by the rows of a group in the mean: data only."""

from __future__ import annotations

from sage_plugin.kernels.linear.search_space import (
    AMD_AXES,
    AMD_TILES,
    ANY_ROWS,
    LARGE_TILES,
    NVIDIA_AXES,
    RDNA_TILES,
    SMALL_TILES,
    tile,
)
from sage_plugin.kernels.search_space import Axes, Region

FEW, SOME = 8, 64
"""Rows of a group up to which its weight decides, and up to which tiles of 128 rows are empty."""

TMA: dict[str, int | str] = {"loads": "descriptor", "group_m": 4}
TMA_TILES = ((128, 128, 128, 4), (128, 256, 128, 8), (128, 256, 64, 8), (64, 128, 128, 4),
             (64, 256, 128, 4), (128, 128, 128, 8))  # fmt: skip
TMA_AXES: Axes = {
    "num_stages": (3, 4), "programs": (1, 2), "group_m": (4, 16),
}  # fmt: skip
WIDE_TILES = ((16, 128, 256, 4), (16, 64, 256, 4), (16, 128, 128, 4), (32, 128, 128, 4),
              (64, 128, 128, 4), (64, 256, 128, 4))  # fmt: skip
WIDE_AXES: Axes = {
    "num_stages": (3, 4), "loads": ("pointer", "descriptor"), "programs": (0, 1, 2),
}  # fmt: skip

REGIONS = (
    Region("emulation", ANY_ROWS, tile(128, 128, 128, 8, 2)),
    Region("sm_90", FEW, tile(16, 128, 256, 4, 3), WIDE_TILES, WIDE_AXES),
    Region("sm_90", SOME, tile(64, 128, 128, 4, 4, programs=2, **TMA), TMA_TILES, TMA_AXES),
    Region("sm_90", ANY_ROWS, tile(128, 128, 128, 4, 3, programs=2, **TMA), TMA_TILES, TMA_AXES),
    Region("sm_10*", SOME, tile(64, 64, 128, 4, 3), SMALL_TILES, NVIDIA_AXES),
    Region("sm_10*", ANY_ROWS, tile(128, 128, 128, 8, 3), LARGE_TILES, NVIDIA_AXES),
    Region("sm_8[07]", SOME, tile(16, 64, 128, 4, 4), SMALL_TILES, NVIDIA_AXES),
    Region("sm_8[07]", ANY_ROWS, tile(128, 256, 64, 8, 4), LARGE_TILES, NVIDIA_AXES),
    Region("sm_*", SOME, tile(16, 64, 128, 4, 3), SMALL_TILES, NVIDIA_AXES),
    Region("sm_*", ANY_ROWS, tile(128, 128, 128, 8, 3), LARGE_TILES, NVIDIA_AXES),
    Region("gfx1*", SOME, tile(16, 64, 64, 4, 1), RDNA_TILES, AMD_AXES),
    Region("gfx1*", ANY_ROWS, tile(64, 64, 64, 4, 1), RDNA_TILES, AMD_AXES),
    Region("gfx*", SOME, tile(16, 64, 128, 4, 1), AMD_TILES, AMD_AXES),
    Region("gfx*", ANY_ROWS, tile(128, 128, 64, 4, 2), AMD_TILES, AMD_AXES),
)
"""Of 8-bit numbers; those of sm_90 by `benchmarks/grouped_rates.py` and a sweep on an H200."""

WIDER = (
    Region("sm_90", ANY_ROWS, tile(128, 256, 128, 8, 4, programs=1, **TMA), TMA_TILES, TMA_AXES),
)
"""Of 16-bit numbers, where their default is another; they go in half steps."""
