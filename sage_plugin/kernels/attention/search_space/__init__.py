"""Launch configs and search spaces of the attention kernels: data only, read from the top."""

from __future__ import annotations

from sage_plugin.kernels.attention.search_space.quantized import FAV3_FP8, FAV3_SAGE, SAGE
from sage_plugin.kernels.attention.search_space.unquantized import SPACE as FAV2
from sage_plugin.kernels.search_space import Space

SPACES: dict[str, Space] = {
    "fav2": FAV2,
    "sage": SAGE,
    "fav3_sage": FAV3_SAGE,
    "fav3_fp8": FAV3_FP8,
}
"""The space of each kernel that has launch configs."""
