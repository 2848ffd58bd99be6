"""The tables of launch configs: which region answers, and that they are data and no more."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from sage_plugin.errors import ConfigError
from sage_plugin.kernels.space import Region, Space, Tile
from tests.kernels.calls import EMULATED, launch

A, B, C = (launch(block_m=m) for m in (16, 32, 64))


def space_of(kernel: str) -> Space:
    return importlib.import_module(f"sage_plugin.kernels.attention.{kernel}.space").SPACE


@pytest.mark.parametrize(
    ("arch", "head_dim", "element_bytes", "expected"),
    [
        ("sm_90", 64, 2, A),
        ("sm_90", 1, 1, A),
        ("sm_90", 65, 2, B),
        ("sm_90", 64, 4, B),
        ("sm_80", 64, 2, B),
        ("sm_80", 256, 4, B),
        ("gfx942", 64, 4, C),
    ],
)
def test_the_first_region_that_serves_a_call_answers(arch, head_dim, element_bytes, expected):
    space = Space(
        (
            Region("sm_90", 64, A, element_bytes=2),
            Region("sm_*", 256, B),
            Region("gfx9*", 128, C),
        )
    )
    assert space.region(arch, head_dim, element_bytes).default == expected


def test_a_region_of_one_kind_of_mask_leaves_the_others_to_the_next():
    space = Space((Region("sm_*", 128, A, mask_kinds=("dense",)), Region("sm_*", 128, B)))
    found = {kind: space.region("sm_80", 64, 2, kind) for kind in ("none", "key_bias", "dense")}
    assert {kind: region.default for kind, region in found.items()} == {
        "none": B,
        "key_bias": B,
        "dense": A,
    }
    assert space.region("sm_80", 64, 2).default == B


@pytest.mark.parametrize(
    ("arch", "head_dim", "element_bytes"),
    [("sm_80", 257, 2), ("gfx942", 129, 2), ("gfx1100", 64, 2), ("SM_90", 64, 2), ("sm_90", 64, 8)],
)
def test_no_region_serves_what_none_was_made_for(arch, head_dim, element_bytes):
    space = Space((Region("sm_*", 256, B), Region("gfx9*", 128, C)))
    assert space.region(arch, head_dim, element_bytes) is None


def test_candidates_are_every_combination_of_tiles_and_axes_after_the_default():
    default = launch(64, 32, num_warps=4, num_stages=2, maxnreg=0)
    tiles = (Tile(64, 32, 4), Tile(128, 64, 8))
    region = Region("sm_*", 64, default, tiles, {"num_stages": (2, 3), "maxnreg": (0, 128)})
    found = region.candidates()
    assert found[0] == default
    assert [(c.block_m, c.num_stages, c.maxnreg) for c in found[1:]] == [
        (64, 2, 128),
        (64, 3, 0),
        (64, 3, 128),
        (128, 2, 0),
        (128, 2, 128),
        (128, 3, 0),
        (128, 3, 128),
    ]
    assert {(c.block_n, c.num_warps) for c in found if c.block_m == 128} == {(64, 8)}
    assert {c.smooth_v for c in found} == {default.smooth_v}


def test_without_tiles_the_default_is_the_only_candidate():
    assert Region("sm_*", 64, A).candidates() == (A,)


def test_an_axis_that_is_no_field_is_an_error():
    with pytest.raises(ConfigError, match="unknown field 'BLOCK_M'"):
        Region("sm_*", 64, A, (Tile(64, 32, 4),), {"BLOCK_M": (64,)}).candidates()


@pytest.mark.parametrize("kernel", EMULATED)
def test_regions_of_one_architecture_grow_so_that_none_is_unreachable(kernel):
    seen: list[Region] = []
    for region in space_of(kernel).regions:
        for earlier in seen:
            shadowed = (
                earlier.arch in (region.arch, "*")
                and earlier.max_head_dim >= region.max_head_dim
                and earlier.element_bytes >= region.element_bytes
                and set(earlier.mask_kinds) >= set(region.mask_kinds)
            )
            assert not shadowed, region
        seen.append(region)


@pytest.mark.parametrize("kernel", EMULATED)
def test_each_family_of_hardware_is_served_up_to_256_channels_in_fp32(kernel):
    for arch in ("emulation", "sm_80", "sm_90", "sm_121", "gfx942", "gfx1201"):
        assert space_of(kernel).region(arch, 256, 4) is not None
        assert space_of(kernel).region(arch, 257, 2) is None
    assert space_of(kernel).region("x86_64", 64, 2) is None


@pytest.mark.parametrize("kernel", EMULATED)
def test_a_smoothed_v_is_for_kernels_with_an_fp8_v(kernel):
    configs = {c for region in space_of(kernel).regions for c in region.candidates()}
    assert {c.smooth_v for c in configs} == {kernel in ("fav3_sage", "fav3_fp8")}
    assert {c.smooth_k for c in configs} == {kernel != "fav2"}
    assert {c.pv_flush for c in configs} == {1}


def test_the_tables_load_without_triton():
    code = "import sys\n" + "".join(
        f"import sage_plugin.kernels.attention.{kernel}.space\n" for kernel in EMULATED
    )
    code += "assert 'triton' not in sys.modules, 'triton'"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
