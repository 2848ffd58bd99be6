"""Launch configs that the quantised kernels start from: data only, read from the top.

`loads="descriptor"` is TMA, which pays on Hopper with one warpgroup a program and several programs
an SM; elsewhere blocks are loaded by pointers. Defaults of hardware that was not at hand are the
tiles that spill least (`make compile-matrix`).
"""

from __future__ import annotations

from typing import Any

from sage_plugin.kernels.search_space import Axes, Region, Space, Tile
from sage_plugin.schema import LaunchConfig


def launch(
    block_m: int, block_n: int, warps: int, stages: int, *, loads: str = "pointer",
    smooth_v: bool = True, maxnreg: int = 0,
) -> LaunchConfig:  # fmt: skip
    """A launch config with K smoothed and two-level accumulation at every block."""
    return LaunchConfig(block_m, block_n, warps, stages, loads, True, smooth_v, 1, maxnreg)


def hopper(stages: int, *, pv_flush: int, smooth_v: bool = True, **more: Any) -> LaunchConfig:  # noqa: ANN401
    """A launch config of the Gluon kernel, whose loads are all TMA."""
    return LaunchConfig(
        192, 128, 12, stages, "descriptor", True, smooth_v, pv_flush, persistent=True, **more
    )


GLUON_TILES = (Tile(192, 128, 12), Tile(128, 128, 8))
GLUON_AXES: Axes = {"num_stages": (2, 3, 4), "persistent": (False, True)}
GLUON_64_AXES: Axes = {**GLUON_AXES, "overlap": (False, True)}
UNMASKED = ("none", "key_bias")
HOPPER_TILES = (Tile(64, 128, 4), Tile(64, 64, 4), Tile(128, 128, 8))
QUARTER_SM, THIRD_SM = 128, 168
"""Register limits that let four and three programs of four warps share an SM."""
DENSE = ("dense",)
"""A mask of rows and keys has configs of its own: one that adds is loaded ahead like K and V."""
DENSE_TILES = (*HOPPER_TILES, Tile(64, 128, 8), Tile(64, 64, 8))
LOADS = ("descriptor", "pointer")
HOPPER_64_AXES: Axes = {
    "num_stages": (2, 3, 4),
    "maxnreg": (0, QUARTER_SM, THIRD_SM),
    "loads": LOADS,
}
HOPPER_128_AXES: Axes = {"num_stages": (2, 3), "maxnreg": (0, QUARTER_SM, THIRD_SM), "loads": LOADS}
NVIDIA_TILES = (
    Tile(128, 64, 4),
    Tile(128, 64, 8),
    Tile(128, 128, 8),
    Tile(64, 64, 4),
    Tile(128, 32, 4),
    Tile(128, 32, 8),
)
NVIDIA_AXES: Axes = {"num_stages": (2, 3, 4)}
AMD_TILES = (Tile(128, 64, 4), Tile(128, 32, 4), Tile(64, 64, 4))
RDNA_TILES = (Tile(128, 64, 8), Tile(128, 32, 8), Tile(64, 32, 8), Tile(64, 32, 4))
AMD_AXES: Axes = {"num_stages": (1, 2), "waves_per_eu": (0, 1, 2, 3)}
CDNA_AXES: Axes = {**AMD_AXES, "matrix_instr_nonkdim": (0, 16, 32)}
EMULATION_TILES = (Tile(128, 64, 4), Tile(128, 128, 4), Tile(128, 256, 4))


LARGE_TILES = (Tile(64, 32, 8), Tile(64, 64, 8), Tile(128, 32, 8), Tile(64, 32, 4), Tile(32, 32, 4))
LARGE_AXES: Axes = {"num_stages": (1, 2, 3)}
"""Of heads above 128 channels, whose blocks of keys are half as many for the same memory."""
LARGE_AMD_TILES = (Tile(64, 32, 4), Tile(32, 32, 4), Tile(64, 64, 8), Tile(64, 32, 8))
QUANTIZERS: Axes = {"smooth_k": (True, False), "hadamard": (0, 64), "q_granule": (1, 16)}
"""How Q and K are quantized."""
FP8_VALUES: Axes = {"smooth_v": (True, False), "pv_flush": (0, 1)}
GLUON_FP8_VALUES: Axes = {
    "smooth_v": (True, False),
    "pv_flush": (4, 8, 32),
    "exp_linear": (0, 4, 6),
}
SAGE_RECIPES: dict[str, Axes] = {
    "portable": QUANTIZERS,
    "hopper": {**QUANTIZERS, "pv_flush": (0, 8, 32)},
}
FP8_RECIPES: dict[str, Axes] = {
    "portable": {**QUANTIZERS, **FP8_VALUES},
    "hopper": {**QUANTIZERS, **GLUON_FP8_VALUES},
}


def common_regions(*, smooth_v: bool) -> tuple[Region[LaunchConfig], ...]:
    """Regions of every architecture that has no region of its own for a kernel."""

    def at(*tile: int) -> LaunchConfig:
        return launch(*tile, smooth_v=smooth_v)

    return (
        Region("emulation", 256, at(128, 128, 4, 1), EMULATION_TILES),
        # Triton 3.9 cannot pipeline a walk over a list of tiles there.
        Region("sm_1[01]*", 128, at(128, 64, 8, 1), NVIDIA_TILES, mask_kinds=DENSE),
        Region("sm_1[01]*", 128, at(128, 64, 8, 2), NVIDIA_TILES, NVIDIA_AXES),
        Region("sm_*", 64, at(128, 64, 8, 3), NVIDIA_TILES, NVIDIA_AXES),
        Region("sm_*", 128, at(128, 32, 8, 2), NVIDIA_TILES, NVIDIA_AXES),
        Region("sm_*", 256, at(64, 32, 8, 1), LARGE_TILES, LARGE_AXES),
        Region("gfx11*", 64, at(128, 32, 8, 1), RDNA_TILES, AMD_AXES),
        Region("gfx11*", 128, at(64, 32, 8, 1), RDNA_TILES, AMD_AXES),
        Region("gfx11*", 256, at(32, 32, 16, 1), (Tile(32, 32, 8), Tile(64, 32, 16)), AMD_AXES),
        Region("gfx12*", 64, at(128, 64, 8, 1), RDNA_TILES, AMD_AXES),
        Region("gfx12*", 128, at(64, 32, 8, 1), RDNA_TILES, AMD_AXES),
        Region("gfx12*", 256, at(64, 32, 8, 1), LARGE_AMD_TILES, AMD_AXES),
        Region("gfx*", 128, at(128, 64, 4, 1), AMD_TILES, CDNA_AXES),
        Region("gfx*", 256, at(64, 32, 4, 1), LARGE_AMD_TILES, CDNA_AXES),
    )


HOPPER_64_INT8 = launch(64, 128, 4, 2, loads="descriptor", smooth_v=False, maxnreg=QUARTER_SM)
HOPPER_128_INT8 = launch(64, 64, 4, 2, loads="descriptor", smooth_v=False, maxnreg=THIRD_SM)
GLUON_64_INT8 = hopper(4, pv_flush=32, smooth_v=False)
GLUON_128_INT8 = hopper(2, pv_flush=32, smooth_v=False)
GLUON_128_INT8_TILES = (Tile(192, 128, 12), Tile(192, 64, 12), Tile(128, 64, 8))
GLUON_INT8_AXES: Axes = {
    "num_stages": (2, 3, 4),
    "overlap": (False, True),
    "persistent": (False, True),
}

SAGE = Space(
    (
        Region("sm_90", 64, HOPPER_64_INT8, DENSE_TILES, HOPPER_64_AXES, mask_kinds=DENSE),
        Region("sm_90", 128, HOPPER_128_INT8, DENSE_TILES, HOPPER_128_AXES, mask_kinds=DENSE),
        Region("sm_90", 64, HOPPER_64_INT8, HOPPER_TILES, HOPPER_64_AXES),
        Region("sm_90", 128, HOPPER_128_INT8, HOPPER_TILES, HOPPER_128_AXES),
        Region("sm_90", 64, GLUON_64_INT8, GLUON_TILES, GLUON_INT8_AXES, 4, UNMASKED, "hopper"),
        Region(
            "sm_90", 128, GLUON_128_INT8, GLUON_128_INT8_TILES, GLUON_INT8_AXES, 4, UNMASKED,
            "hopper",
        ),
        *common_regions(smooth_v=False),
    ),
    SAGE_RECIPES,
)  # fmt: skip
"""INT8 Q and K with FP16 P and V."""

HOPPER_128_FP8 = launch(64, 128, 4, 2, loads="descriptor", maxnreg=THIRD_SM)
MASKED_64_FP8 = launch(64, 128, 4, 2, loads="descriptor", maxnreg=QUARTER_SM)
GLUON_64_FP8 = hopper(3, pv_flush=8, exp_linear=6, overlap=True)
GLUON_128_FP8 = hopper(3, pv_flush=8, exp_linear=6)


def _fp8_values(*, stages_64: int) -> Space:
    """The space of a kernel with FP8 P and V, whose defaults at 64 channels differ in stages."""
    hopper_64 = launch(64, 128, 4, stages_64, loads="descriptor", maxnreg=QUARTER_SM)
    return Space(
        (
            Region("sm_90", 64, MASKED_64_FP8, DENSE_TILES, HOPPER_64_AXES, mask_kinds=DENSE),
            Region("sm_90", 128, HOPPER_128_FP8, DENSE_TILES, HOPPER_128_AXES, mask_kinds=DENSE),
            Region("sm_90", 64, hopper_64, HOPPER_TILES, HOPPER_64_AXES),
            Region("sm_90", 128, HOPPER_128_FP8, HOPPER_TILES, HOPPER_128_AXES),
            Region("sm_90", 64, GLUON_64_FP8, GLUON_TILES, GLUON_64_AXES, 4, UNMASKED, "hopper"),
            Region("sm_90", 128, GLUON_128_FP8, GLUON_TILES, GLUON_AXES, 4, UNMASKED, "hopper"),
            *common_regions(smooth_v=True),
        ),
        FP8_RECIPES,
    )


FAV3_SAGE = _fp8_values(stages_64=3)
FAV3_FP8 = _fp8_values(stages_64=2)
