"""Launch configs of `sage`: data only, read from the top."""

from __future__ import annotations

from sage_plugin.kernels.attention.quantised_space import (
    HOPPER_AXES,
    HOPPER_TILES,
    common_regions,
    launch,
)
from sage_plugin.kernels.space import Region, Space

SPACE = Space(
    (
        Region("sm_90", 64, launch(128, 128, 8, 3, loads="descriptor", smooth_v=False), HOPPER_TILES, HOPPER_AXES),
        Region("sm_90", 128, launch(128, 128, 8, 3, loads="descriptor", smooth_v=False), HOPPER_TILES, HOPPER_AXES),
        *common_regions(smooth_v=False),
    )
)
