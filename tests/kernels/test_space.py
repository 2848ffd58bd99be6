"""The tables of launch configs: which region answers, and that they are data and no more."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sage_plugin.errors import ConfigError
from sage_plugin.kernels.attention.search_space import SPACES
from sage_plugin.kernels.search_space import Region, Space, Tile
from tests.kernels.calls import EMULATED, HOPPER, launch

A, B, C = (launch(block_m=m) for m in (16, 32, 64))


def space_of(kernel: str) -> Space:
    return SPACES[kernel]


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


def test_a_recipe_is_searched_beside_the_axes_and_keeps_the_default():
    default = launch(64, 32, num_warps=4, num_stages=2, smooth_k=True, pv_flush=3)
    region = Region("sm_*", 64, default, (Tile(64, 32, 4),), {"num_stages": (2, 3)})
    found = region.candidates({"smooth_k": (True, False), "pv_flush": (1, 8)})
    assert found[0] == default
    assert len(found) == len(set(found)) == 2 * 2 * 3
    assert {c.pv_flush for c in found} == {1, 3, 8}


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
                and earlier.most >= region.most
                and earlier.element_bytes >= region.element_bytes
                and set(earlier.mask_kinds) >= set(region.mask_kinds)
                and earlier.variant == region.variant
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
    every = {variant: configs_of(kernel, variant) for variant in ("portable", "hopper")}
    configs = every["portable"] | every["hopper"]
    assert {c.smooth_v for c in configs} == {kernel in ("fav3_sage", "fav3_fp8")}
    assert {c.smooth_k for c in configs} == {kernel != "fav2"}
    assert {c.pv_flush for c in every["portable"]} == {1}
    assert {c.exp_linear for c in every["portable"]} == {0}
    assert {c.overlap for c in every["portable"]} == {False}
    assert {c.persistent for c in every["portable"]} == {False}


def configs_of(kernel, variant):
    """Every config that the regions of a variant offer."""
    regions = [region for region in space_of(kernel).regions if region.variant == variant]
    return {config for region in regions for config in region.candidates()}


@pytest.mark.parametrize("kernel", HOPPER)
def test_a_hopper_region_serves_what_the_decision_table_gives_it(kernel):
    space = space_of(kernel)
    for dim in (33, 64, 65, 128):
        for element_bytes in (2, 4):
            for mask in ("none", "key_bias"):
                region = space.region("sm_90", dim, element_bytes, mask, "hopper")
                assert region.variant == "hopper"
                assert region.most == (64 if dim <= 64 else 128)
    assert space.region("sm_90", 64, 2, "dense", "hopper") is None
    assert space.region("sm_90", 129, 2, "none", "hopper") is None
    for arch in ("sm_80", "sm_100", "sm_120", "gfx942"):
        assert space.region(arch, 64, 2, "none", "hopper") is None
    plain = space.region("sm_90", 64, 2)
    assert plain.variant == "portable"
    assert plain.default.block_m == 64


def test_a_region_of_another_variant_is_passed_over_but_by_the_emulation():
    space = Space((Region("*", 64, A, variant="hopper"), Region("*", 64, B)))
    assert space.region("sm_90", 64, 2).default == B
    assert space.region("sm_90", 64, 2, variant="hopper").default == A
    assert space.region("sm_90", 64, 2, variant="emulation") is None
    assert space.region("emulation", 64, 2, variant="emulation").default == A


@pytest.mark.parametrize("kernel", sorted(set(EMULATED) - set(HOPPER)))
def test_a_kernel_without_a_hopper_variant_has_no_hopper_region(kernel):
    assert configs_of(kernel, "hopper") == set()


def test_the_tables_load_without_triton():
    code = "import sys\n" + "".join(
        f"from sage_plugin.kernels.attention.search_space import SPACES; SPACES['{kernel}']\n"
        for kernel in EMULATED
    )
    code += "assert 'triton' not in sys.modules, 'triton'"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
