"""Launch configs of paged attention: data only, read from the top; they import without Triton.

Those of sm_90 are the fastest of a sweep on an H200: 32 query and 8 key heads of 128 channels that
decode 16 sequences of 8,192 keys, and a prompt of 16,384. A region whose default loads by
descriptors serves only calls whose steps lie inside of a page. Others are tiles that spill little.
"""

from __future__ import annotations

from sage_plugin.kernels.search_space import Axes, Region
from sage_plugin.paged_records import PagedLaunch

DECODE = ("decode",)
DECODE_TILES = ((16, 32, 2), (16, 64, 2), (16, 64, 4), (16, 128, 4), (16, 128, 8), (32, 64, 4))
ROW_TILES = ((64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (64, 128, 4))
SMALL_TILES = ((32, 32, 4), (64, 32, 4), (64, 32, 8), (32, 64, 4), (32, 16, 4))
NVIDIA_AXES: Axes = {"num_stages": (2, 3, 4)}
SPLIT_AXES: Axes = {
    "num_stages": (2, 3, 4, 5), "splits": (0, 1, 2, 4, 8, 16, 32),
}  # fmt: skip
LOADS: tuple[int | str, ...] = ("pointer", "descriptor")
HOPPER_AXES = {**SPLIT_AXES, "loads": LOADS}
LOAD_AXES = {**NVIDIA_AXES, "loads": LOADS}
AMD_AXES: Axes = {"num_stages": (1, 2), "waves_per_eu": (0, 2)}


def _tma(rows: int, keys: int, warps: int, stages: int) -> PagedLaunch:
    return PagedLaunch(rows, keys, warps, stages, loads="descriptor")


REGIONS = (
    Region("emulation", 256, PagedLaunch(16, 32, 4, 1, splits=1)),
    Region("sm_90", 128, _tma(16, 64, 2, 3), DECODE_TILES, HOPPER_AXES, 1, kinds=DECODE),
    Region("sm_90", 128, _tma(16, 64, 4, 3), DECODE_TILES, HOPPER_AXES, 2, kinds=DECODE),
    Region("sm_*", 128, PagedLaunch(16, 64, 4, 3), DECODE_TILES, SPLIT_AXES, 2, kinds=DECODE),
    Region("sm_*", 256, PagedLaunch(16, 32, 4, 2), DECODE_TILES, SPLIT_AXES, kinds=DECODE),
    Region("sm_90", 128, _tma(64, 64, 4, 3), ROW_TILES, LOAD_AXES, 2),
    Region("sm_90", 128, PagedLaunch(128, 64, 8, 3), ROW_TILES, NVIDIA_AXES, 2),
    Region("sm_*", 128, PagedLaunch(64, 32, 4, 2), (*ROW_TILES, *SMALL_TILES), NVIDIA_AXES, 2),
    Region("sm_*", 256, PagedLaunch(64, 32, 8, 2), (*ROW_TILES, *SMALL_TILES), NVIDIA_AXES, 2),
    Region("sm_*", 256, PagedLaunch(32, 32, 4, 1), SMALL_TILES, NVIDIA_AXES),
    Region("gfx*", 256, PagedLaunch(16, 32, 4, 1), DECODE_TILES, AMD_AXES, kinds=DECODE),
    Region("gfx*", 128, PagedLaunch(64, 32, 4, 1), ROW_TILES, AMD_AXES, 2),
    Region("gfx*", 256, PagedLaunch(32, 32, 4, 1), SMALL_TILES, AMD_AXES),
)
