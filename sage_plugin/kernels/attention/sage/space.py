"""Launch configs of `sage`: data only, read from the top."""

from __future__ import annotations

from sage_plugin.kernels.attention.quantised_space import (
    DENSE,
    DENSE_TILES,
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
from sage_plugin.kernels.space import Region, Space, Tile

HOPPER_64 = launch(64, 128, 4, 2, loads="descriptor", smooth_v=False, maxnreg=QUARTER_SM)
HOPPER_128 = launch(64, 64, 4, 2, loads="descriptor", smooth_v=False, maxnreg=THIRD_SM)
GLUON_64 = hopper(192, 128, 12, 4, pv_flush=32, smooth_v=False)
GLUON_128 = hopper(192, 128, 12, 2, pv_flush=32, smooth_v=False)
GLUON_128_TILES = (Tile(192, 128, 12), Tile(192, 64, 12), Tile(128, 64, 8))
GLUON_AXES = {
    "num_stages": (2, 3, 4),
    "overlap": (False, True),
    "persistent": (False, True),
}
MASKED_64 = launch(64, 128, 4, 2, loads="descriptor", smooth_v=False, maxnreg=QUARTER_SM)
MASKED_128 = launch(64, 64, 4, 2, loads="descriptor", smooth_v=False, maxnreg=THIRD_SM)

SPACE = Space(
    (
        Region("sm_90", 64, MASKED_64, DENSE_TILES, HOPPER_64_AXES, mask_kinds=DENSE),
        Region("sm_90", 128, MASKED_128, DENSE_TILES, HOPPER_128_AXES, mask_kinds=DENSE),
        Region("sm_90", 64, HOPPER_64, HOPPER_TILES, HOPPER_64_AXES),
        Region("sm_90", 128, HOPPER_128, HOPPER_TILES, HOPPER_128_AXES),
        Region("sm_90", 64, GLUON_64, GLUON_TILES, GLUON_AXES, 4, UNMASKED, "hopper"),
        Region("sm_90", 128, GLUON_128, GLUON_128_TILES, GLUON_AXES, 4, UNMASKED, "hopper"),
        *common_regions(smooth_v=False),
    )
)
