"""Launch configs of `sage`: data only, read from the top."""

from __future__ import annotations

from sage_plugin.kernels.attention.quantised_space import (
    DENSE,
    DENSE_TILES,
    HOPPER_64_AXES,
    HOPPER_128_AXES,
    HOPPER_TILES,
    QUARTER_SM,
    THIRD_SM,
    common_regions,
    launch,
)
from sage_plugin.kernels.space import Region, Space

HOPPER_64 = launch(64, 128, 4, 2, loads="descriptor", smooth_v=False, maxnreg=QUARTER_SM)
HOPPER_128 = launch(64, 64, 4, 2, loads="descriptor", smooth_v=False, maxnreg=THIRD_SM)
MASKED_64 = launch(64, 128, 4, 2, loads="descriptor", smooth_v=False, maxnreg=QUARTER_SM)
MASKED_128 = launch(64, 64, 4, 2, loads="descriptor", smooth_v=False, maxnreg=THIRD_SM)

SPACE = Space(
    (
        Region("sm_90", 64, MASKED_64, DENSE_TILES, HOPPER_64_AXES, mask_kinds=DENSE),
        Region("sm_90", 128, MASKED_128, DENSE_TILES, HOPPER_128_AXES, mask_kinds=DENSE),
        Region("sm_90", 64, HOPPER_64, HOPPER_TILES, HOPPER_64_AXES),
        Region("sm_90", 128, HOPPER_128, HOPPER_TILES, HOPPER_128_AXES),
        *common_regions(smooth_v=False),
    )
)
