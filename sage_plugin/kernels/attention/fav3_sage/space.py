"""Launch configs of `fav3_sage`: data only, read from the top."""

from __future__ import annotations

from sage_plugin.kernels.attention.quantised_space import (
    HOPPER_AXES,
    HOPPER_TILES,
    common_regions,
    launch,
)
from sage_plugin.kernels.space import Region, Space

QUARTER_SM = 128
THIRD_SM = 168
"""Register limits that let four and three programs of four warps share an SM."""

SPACE = Space(
    (
        Region(
            "sm_90", 64, launch(64, 128, 4, 2, loads="descriptor", maxnreg=QUARTER_SM), HOPPER_TILES, HOPPER_AXES
        ),
        Region(
            "sm_90", 128, launch(64, 128, 4, 2, loads="descriptor", maxnreg=THIRD_SM), HOPPER_TILES, HOPPER_AXES
        ),
        *common_regions(smooth_v=True),
    )
)
