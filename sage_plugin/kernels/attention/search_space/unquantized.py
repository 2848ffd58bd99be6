"""Launch configs of `fav2`: data only, read from the top.

Those of hardware that was not at hand are the tiles that spill least (`make compile-matrix`): head
dims that are padded need registers for the pointers of their loads, and dense masks for their
values. On RDNA 3 each lane holds its factors twice: heads of 256 channels spill whatever the tile.
"""

from __future__ import annotations

from sage_plugin.kernels.search_space import Axes, Region, Space, Tile
from sage_plugin.schema import LaunchConfig


def _config(block_m: int, block_n: int, num_warps: int, num_stages: int) -> LaunchConfig:
    return LaunchConfig(block_m, block_n, num_warps, num_stages, "pointer", False, False, 1)


NVIDIA_TILES = (Tile(128, 64, 4), Tile(128, 64, 8), Tile(128, 128, 8), Tile(64, 64, 4))
NVIDIA_AXES: Axes = {"num_stages": (2, 3, 4)}
LARGE_TILES = (Tile(64, 64, 8), Tile(128, 32, 8), Tile(64, 32, 8), Tile(64, 32, 4), Tile(32, 32, 4))
LARGE_AXES: Axes = {"num_stages": (1, 2, 3)}
"""Of heads above 128 channels."""
DENSE = ("dense",)
WARP_TILES = (*NVIDIA_TILES, Tile(128, 32, 8), Tile(128, 32, 4))
AMD_TILES = (Tile(128, 64, 4), Tile(128, 32, 4), Tile(64, 32, 4))
RDNA_TILES = (Tile(128, 32, 8), Tile(64, 32, 8), Tile(64, 16, 4), Tile(64, 16, 8))
AMD_AXES: Axes = {"num_stages": (1, 2), "waves_per_eu": (0, 2)}

SPACE = Space(
    (
        Region("emulation", 256, _config(128, 128, 4, 1), (Tile(128, 64, 4), Tile(128, 256, 4))),
        Region("sm_90", 128, _config(128, 64, 8, 3), NVIDIA_TILES, NVIDIA_AXES, 2, DENSE),
        Region("sm_90", 64, _config(128, 64, 4, 3), NVIDIA_TILES, NVIDIA_AXES, element_bytes=2),
        Region("sm_90", 128, _config(128, 64, 8, 3), NVIDIA_TILES, NVIDIA_AXES, element_bytes=2),
        # Triton 3.9 cannot pipeline a walk over a list of tiles there.
        Region("sm_1[01]*", 128, _config(128, 64, 8, 1), NVIDIA_TILES, {}, 2, DENSE),
        Region("sm_1[01]*", 256, _config(64, 32, 8, 1), LARGE_TILES, {}, 2, DENSE),
        Region("sm_1[01]*", 128, _config(128, 64, 8, 2), NVIDIA_TILES, NVIDIA_AXES, 2),
        Region("sm_*", 128, _config(64, 32, 4, 2), WARP_TILES, NVIDIA_AXES, 2, DENSE),
        Region("sm_*", 63, _config(64, 32, 4, 2), WARP_TILES, NVIDIA_AXES, element_bytes=2),
        Region("sm_*", 64, _config(128, 32, 4, 2), WARP_TILES, NVIDIA_AXES, element_bytes=2),
        Region("sm_*", 127, _config(64, 32, 4, 2), WARP_TILES, NVIDIA_AXES, element_bytes=2),
        Region("sm_*", 128, _config(128, 32, 8, 2), WARP_TILES, NVIDIA_AXES, element_bytes=2),
        Region("sm_*", 256, _config(64, 32, 8, 2), LARGE_TILES, LARGE_AXES, element_bytes=2),
        Region("sm_*", 128, _config(32, 32, 4, 1), (Tile(64, 32, 4),), element_bytes=4),
        Region("sm_*", 256, _config(16, 16, 4, 1), (), element_bytes=4),
        Region("gfx11*", 64, _config(64, 16, 4, 1), RDNA_TILES, AMD_AXES, element_bytes=2),
        Region("gfx11*", 128, _config(32, 16, 8, 1), RDNA_TILES, AMD_AXES, element_bytes=2),
        Region("gfx11*", 256, _config(16, 16, 8, 1), (Tile(32, 16, 8),), AMD_AXES, 2),
        Region("gfx12*", 64, _config(128, 32, 8, 1), RDNA_TILES, AMD_AXES, element_bytes=2),
        Region("gfx12*", 128, _config(64, 32, 8, 1), RDNA_TILES, AMD_AXES, element_bytes=2),
        Region("gfx12*", 256, _config(32, 16, 8, 1), (Tile(64, 16, 8),), AMD_AXES, 2),
        Region("gfx1[12]*", 128, _config(16, 16, 8, 1), (Tile(32, 16, 8),), element_bytes=4),
        Region("gfx1[12]*", 256, _config(16, 16, 16, 1), (), element_bytes=4),
        Region("gfx*", 128, _config(128, 32, 4, 1), AMD_TILES, AMD_AXES, element_bytes=2),
        Region("gfx*", 256, _config(32, 16, 4, 1), (Tile(32, 32, 4), Tile(64, 16, 4)), AMD_AXES),
    )
)
