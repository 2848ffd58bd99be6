"""Launch configs of grouped products, by the rows of a group in the mean: data only."""

from __future__ import annotations

from sage_plugin.kernels.linear.search_space import (
    AMD_AXES,
    AMD_TILES,
    ANY_ROWS,
    HOPPER_TILES,
    LARGE_TILES,
    NVIDIA_AXES,
    RDNA_TILES,
    SMALL_TILES,
    TMA,
    TMA_AXES,
    LinearRegion,
    tile,
)

FEW = 64

REGIONS = (
    LinearRegion("emulation", ANY_ROWS, tile(128, 128, 128, 8, 2)),
    LinearRegion("sm_90", FEW, tile(64, 128, 128, 4, 4), HOPPER_TILES, NVIDIA_AXES),
    LinearRegion("sm_90", ANY_ROWS, tile(128, 256, 128, 8, 3, **TMA), LARGE_TILES, TMA_AXES),
    LinearRegion("sm_10*", FEW, tile(64, 64, 128, 4, 3), SMALL_TILES, NVIDIA_AXES),
    LinearRegion("sm_10*", ANY_ROWS, tile(128, 128, 128, 8, 3), LARGE_TILES, NVIDIA_AXES),
    LinearRegion("sm_8[07]", FEW, tile(16, 64, 128, 4, 4), SMALL_TILES, NVIDIA_AXES),
    LinearRegion("sm_8[07]", ANY_ROWS, tile(128, 256, 64, 8, 4), LARGE_TILES, NVIDIA_AXES),
    LinearRegion("sm_*", FEW, tile(16, 64, 128, 4, 3), SMALL_TILES, NVIDIA_AXES),
    LinearRegion("sm_*", ANY_ROWS, tile(128, 128, 128, 8, 3), LARGE_TILES, NVIDIA_AXES),
    LinearRegion("gfx1*", FEW, tile(16, 64, 64, 4, 1), RDNA_TILES, AMD_AXES),
    LinearRegion("gfx1*", ANY_ROWS, tile(64, 64, 64, 4, 1), RDNA_TILES, AMD_AXES),
    LinearRegion("gfx*", FEW, tile(16, 64, 128, 4, 1), AMD_TILES, AMD_AXES),
    LinearRegion("gfx*", ANY_ROWS, tile(128, 128, 64, 4, 2), AMD_TILES, AMD_AXES),
)
