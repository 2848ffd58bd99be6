"""Launch configs of `fav3_sage`: data only, read from the top."""

from __future__ import annotations

from sage_plugin.kernels.attention.quantised_space import (
    DENSE,
    DENSE_TILES,
    GLUON_64_AXES,
    GLUON_AXES,
    GLUON_TILES,
    HOPPER_64_AXES,
    HOPPER_128_AXES,
    HOPPER_TILES,
    QUARTER_SM,
    THIRD_SM,
    UNMASKED,
    common_regions,
    hopper,
    launch,
)
from sage_plugin.kernels.space import Region, Space

HOPPER_64 = launch(64, 128, 4, 3, loads="descriptor", smooth_v=True, maxnreg=QUARTER_SM)
HOPPER_128 = launch(64, 128, 4, 2, loads="descriptor", smooth_v=True, maxnreg=THIRD_SM)
GLUON_64 = hopper(192, 128, 12, 3, pv_flush=8, exp_linear=6, overlap=True)
GLUON_128 = hopper(192, 128, 12, 3, pv_flush=8, exp_linear=6)
MASKED_64 = launch(64, 128, 4, 2, loads="descriptor", smooth_v=True, maxnreg=QUARTER_SM)
MASKED_128 = launch(64, 128, 4, 2, loads="descriptor", smooth_v=True, maxnreg=THIRD_SM)

SPACE = Space(
    (
        Region("sm_90", 64, MASKED_64, DENSE_TILES, HOPPER_64_AXES, mask_kinds=DENSE),
        Region("sm_90", 128, MASKED_128, DENSE_TILES, HOPPER_128_AXES, mask_kinds=DENSE),
        Region("sm_90", 64, HOPPER_64, HOPPER_TILES, HOPPER_64_AXES),
        Region("sm_90", 128, HOPPER_128, HOPPER_TILES, HOPPER_128_AXES),
        Region("sm_90", 64, GLUON_64, GLUON_TILES, GLUON_64_AXES, 4, UNMASKED, "hopper"),
        Region("sm_90", 128, GLUON_128, GLUON_TILES, GLUON_AXES, 4, UNMASKED, "hopper"),
        *common_regions(smooth_v=True),
    )
)
