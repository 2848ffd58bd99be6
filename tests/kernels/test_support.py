"""The support table: every row, every reason, and that what it claims has a legal default."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from sage_plugin import device
from sage_plugin.kernels.attention import dispatch, launch_space
from sage_plugin.kernels.attention.support_row import Support, support
from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.support import (
    ALL,
    ARCHITECTURES,
    LOWEST_TRITON,
    NEWEST_TRITON,
    UNQUANTIZED,
    architecture,
    hopper_reason,
    kernels_of,
    prologue_reason,
    release,
)
from sage_plugin.schema import KERNELS, CallShape
from tests.kernels.calls import HOPPER
from tests.kernels.devices import facts

ROOT = Path(__file__).resolve().parents[2]
NO_PRODUCT = (
    " has no INT8 tensor product in Triton, and its 16-bit ones run outside of the matrix units"
)
NO_FP8 = " has no FP8 matrix units"
FN, FNUZ = "float8_e4m3fn", "float8_e4m3fnuz"
# Architecture -> kernels, FP8 type, KiB of shared memory of a program, why the rest does not run.
TABLE = {
    "sm_70": ((), None, 64, NO_PRODUCT),
    "sm_72": ((), None, 64, NO_PRODUCT),
    "sm_75": ((), None, 64, NO_PRODUCT),
    "sm_80": (UNQUANTIZED, None, 163, NO_FP8),
    "sm_86": (UNQUANTIZED, None, 99, NO_FP8),
    "sm_87": (UNQUANTIZED, None, 163, NO_FP8),
    "sm_89": (ALL, FN, 99, ""),
    "sm_90": (ALL, FN, 227, ""),
    "sm_100": (ALL, FN, 227, ""),
    "sm_103": (ALL, FN, 227, ""),
    "sm_110": (ALL, FN, 227, ""),
    "sm_120": (ALL, FN, 99, ""),
    "sm_121": (ALL, FN, 99, ""),
    "gfx908": (UNQUANTIZED, None, 64, NO_FP8),
    "gfx90a": (UNQUANTIZED, None, 64, NO_FP8),
    "gfx942": (ALL, FNUZ, 64, ""),
    "gfx950": (ALL, FN, 160, ""),
    "gfx1100": (UNQUANTIZED, None, 64, NO_FP8),
    "gfx1101": (UNQUANTIZED, None, 64, NO_FP8),
    "gfx1102": (UNQUANTIZED, None, 64, NO_FP8),
    "gfx1103": (UNQUANTIZED, None, 64, NO_FP8),
    "gfx1150": (UNQUANTIZED, None, 64, NO_FP8),
    "gfx1151": (UNQUANTIZED, None, 64, NO_FP8),
    "gfx1152": (UNQUANTIZED, None, 64, NO_FP8),
    "gfx1153": (UNQUANTIZED, None, 64, NO_FP8),
    "gfx1200": (ALL, FN, 64, ""),
    "gfx1201": (ALL, FN, 64, ""),
}
# The default tile of 128 channels in bf16: rows, keys, warps, stages.
TILES = {
    ("sm_80", "fav2"): (128, 32, 8, 2),
    ("sm_80", "sage"): (128, 32, 8, 2),
    ("sm_90", "fav2"): (128, 64, 8, 3),
    ("sm_90", "fav3_sage"): (192, 128, 12, 3),
    ("sm_90", "fav3_fp8"): (192, 128, 12, 3),
    ("sm_100", "fav2"): (128, 64, 8, 2),
    ("sm_110", "fav3_sage"): (128, 64, 8, 2),
    ("sm_121", "fav3_fp8"): (128, 32, 8, 2),
    ("gfx942", "fav3_sage"): (128, 64, 4, 1),
    ("gfx950", "fav2"): (128, 32, 4, 1),
    ("gfx1100", "fav2"): (32, 16, 8, 1),
    ("gfx1151", "sage"): (64, 32, 8, 1),
    ("gfx1201", "fav3_fp8"): (64, 32, 8, 1),
}
UNKNOWN = (
    *("sm_61", "sm_88", "sm_115", "sm_999", "sm_"),
    *("gfx803", "gfx906", "gfx940", "gfx1030", "gfx"),
)
DIMS = (1, 8, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256)
DTYPES = ("float16", "bfloat16", "float32")


@pytest.fixture(autouse=True)
def newest(monkeypatch):
    """Every test has the newest Triton, unless it says otherwise."""
    monkeypatch.setattr(device, "triton_version", lambda: f"{NEWEST_TRITON}.0")


def test_the_table_has_these_rows_and_no_others():
    names = [name for row in ARCHITECTURES for name in row.names]
    assert sorted(names) == sorted(TABLE)
    assert {row.kind for row in ARCHITECTURES} == {"cuda", "hip"}


@pytest.mark.parametrize("arch", TABLE)
def test_report_106_and_108_every_row_of_the_table(arch):
    kernels, fp8, smem_kib, reason = TABLE[arch]
    assert architecture(arch).smem_kib == smem_kib
    assert architecture(arch).kind == ("hip" if arch.startswith("gfx") else "cuda")
    assert device.fp8_dtype(arch) == fp8
    assert kernels_of(facts(arch)) == ("torch", "sdpa", *kernels)
    assert (prologue_reason(facts(arch)) is None) == bool(kernels)
    for kernel in ALL:
        found = support(kernel, facts(arch))
        if kernel in kernels:
            variant = "hopper" if arch == "sm_90" and kernel in HOPPER else "portable"
            assert (found.variant, found.reason) == (variant, None)
            assert found.fp8_dtype == (fp8 if kernel.startswith("fav3") else None)
            assert found.launch is not None
        else:
            assert found == Support(kernel, None, reason=f"{arch}{reason}")


@pytest.mark.parametrize(("arch", "kernel"), TILES)
def test_the_default_tile_of_an_architecture(arch, kernel):
    config = support(kernel, facts(arch)).launch
    tile = (config.block_m, config.block_n, config.num_warps, config.num_stages)
    assert tile == TILES[arch, kernel]


def test_report_112_and_118_every_claimed_default_is_legal_where_it_is_claimed():
    checked = 0
    for arch, (kernels, *_) in TABLE.items():
        for kernel in kernels:
            for dim in DIMS:
                for mask in ("none", "key_bias", "dense"):
                    for dtype in DTYPES:
                        shape = CallShape(
                            1, 8, 8, 64, 64, dim, dim, dtype, False, mask, "bhsd", 1.0
                        )
                        chosen = dispatch.decide(shape, facts(arch), kernel=kernel)
                        for variant in {"portable", chosen.variant}:
                            key = dispatch.call_key(shape, Decision(kernel, variant))
                            config = launch_space.default_launch(key, facts(arch))
                            reason = launch_space.illegal_reason(config, key, facts(arch))
                            assert reason is None, (arch, key)
                        if mask == "none":
                            found = support(kernel, facts(arch), head_dim=dim, dtype=dtype)
                            key = dispatch.call_key(shape, chosen)
                            assert found.variant == chosen.variant
                            assert found.launch == launch_space.default_launch(key, facts(arch))
                            checked += 1
    assert checked == sum(len(kernels) for kernels, *_ in TABLE.values()) * len(DIMS) * len(DTYPES)


@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("dim", [32, 33, 64, 128, 129, 256])
def test_the_variant_of_an_h100_follows_the_head_dim(kernel, dim):
    found = support(kernel, facts("sm_90"), head_dim=dim)
    gluon = kernel in HOPPER and (65 if kernel == "sage" else 33) <= dim <= 128
    assert found.variant == ("hopper" if gluon else "portable")
    assert (found.launch.block_m in (128, 192) and found.launch.num_warps >= 8) or not gluon


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"mask_kind": "key_bias"}, None),
        ({"kernel": "fav2"}, "fav2 has no Hopper variant"),
        ({"kernel": "sdpa"}, "sdpa has no Hopper variant"),
        ({"arch": "sm_89"}, "the Hopper variant runs on sm_90 alone, and this is sm_89"),
        ({"mask_kind": "dense"}, "the Hopper variant takes no mask of rows and keys"),
        (
            {"special": True},
            "the Hopper variant takes no window, cap, sinks, packed sequences or bias of each head",
        ),
        ({"head_dim": 32}, "the Hopper variant takes head dims 33 to 128, and this is 32"),
        ({"head_dim": 136}, "the Hopper variant takes head dims 33 to 128, and this is 136"),
    ],
    ids=str,
)
def test_why_a_hopper_variant_does_not_take_a_call(fields, reason):
    given = {"kernel": "fav3_sage", "arch": "sm_90", "head_dim": 128} | fields
    kernel, arch, dim = (given.pop(name) for name in ("kernel", "arch", "head_dim"))
    found = hopper_reason(kernel, facts(arch), dim, **given)
    assert (None if found is None else str(found)) == reason


@pytest.mark.parametrize("arch", UNKNOWN)
@pytest.mark.parametrize("kernel", ALL)
def test_report_107_an_unknown_chip_has_one_sentence_and_no_error(arch, kernel):
    found = support(kernel, facts(arch))
    maker = "AMD" if arch.startswith("gfx") else "NVIDIA"
    assert found == Support(kernel, None, reason=f"{arch} is not a known {maker} architecture")
    assert kernels_of(facts(arch)) == ("torch", "sdpa")


@pytest.mark.parametrize("arch", [arch for arch in TABLE if arch.startswith("gfx")])
def test_report_109_amd_is_told_by_its_kind_and_starts_from_one_stage(arch):
    posing = facts(arch, kind="cuda")
    assert support("sage", posing).reason == f"{arch} is not a known NVIDIA architecture"
    for kernel in TABLE[arch][0]:
        for dim in DIMS:
            assert support(kernel, facts(arch), head_dim=dim).launch.num_stages == 1


def test_report_110_every_reason_is_one_sentence_that_names_the_device(monkeypatch):
    devices = [facts(arch) for arch in (*TABLE, *UNKNOWN)]
    devices.append(facts("mps", kind="other"))
    seen = set()
    for version in ("3.5.1", "3.6.0", "3.9.0"):
        monkeypatch.setattr(device, "triton_version", lambda version=version: version)
        for where in devices:
            for kernel in ALL:
                if reason := support(kernel, where).reason:
                    assert where.arch in reason
                    assert not re.search(r"[.\n]$|\. |\n", reason), reason
                    seen.add(reason.replace(where.arch, "X"))
    assert len(seen) == 8, seen


@pytest.mark.parametrize(
    ("version", "arch", "reason"),
    [
        ("3.5.1", "sm_90", "sm_90 needs Triton 3.6 or newer, and 3.5.1 is installed"),
        ("3.5.1", "gfx942", "gfx942 needs Triton 3.6 or newer, and 3.5.1 is installed"),
        ("3.6.0", "sm_110", "sm_110 needs Triton 3.7 or newer, and 3.6.0 is installed"),
        ("3.6.0", "sm_90", None),
        ("3.7.1", "sm_110", None),
        ("3.6.0+git9844da95", "sm_121", None),
        ("3.10.0", "sm_110", None),
        ("4.0", "gfx1201", None),
        ("", "sm_90", "Triton is not installed"),
        ("3.5.1", "sm_75", f"sm_75{NO_PRODUCT}"),
    ],
)
def test_report_110_what_a_triton_cannot_compile_is_named(monkeypatch, version, arch, reason):
    monkeypatch.setattr(device, "triton_version", lambda: version)
    for kernel in UNQUANTIZED:
        assert support(kernel, facts(arch)).reason == reason


def test_report_111_an_fp8_kernel_multiplies_the_type_of_its_chip():
    found = {arch: support("fav3_fp8", facts(arch)).fp8_dtype for arch in TABLE}
    assert {arch for arch, fp8 in found.items() if fp8 == FNUZ} == {"gfx942"}
    assert {arch for arch, fp8 in found.items() if fp8 == FN} == {
        *("sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"),
        *("gfx950", "gfx1200", "gfx1201"),
    }
    blind = facts("sm_90", fp8_dtype=None)
    assert support("fav3_sage", blind).reason == "sm_90 has no FP8 matrix units"
    assert support("sage", blind).reason is None


def test_what_needs_no_chip_runs_everywhere():
    cpu = device.facts("cpu")
    for kernel in KERNELS:
        host = kernel in ("torch", "sdpa")
        assert support(kernel, cpu).variant == ("host" if host else "emulation")
        if host:
            assert support(kernel, facts("sm_61")) == Support(kernel, "host")
    assert support("fav3_sage", cpu).fp8_dtype == FN
    assert support("sage", cpu).launch.block_n == 128
    assert support("sage", facts("mps", kind="other")).reason == (
        "no kernel runs on device type mps"
    )


def test_a_head_dim_without_a_config_has_its_sentence():
    assert support("sage", facts("sm_90"), head_dim=257) == Support(
        "sage", None, reason="sage takes no head dim 257"
    )


@pytest.mark.parametrize(
    ("version", "expected"),
    [("3.6.0", (3, 6)), ("3.10.1+git1", (3, 10)), ("4.0", (4, 0)), ("3", (3,)), ("", ())],
)
def test_a_version_becomes_numbers(version, expected):
    assert release(version) == expected


def test_the_lowest_triton_is_that_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = extras["optional-dependencies"]["triton"]
    assert wanted == [f"triton>={LOWEST_TRITON}; sys_platform == 'linux'"]
    assert release(LOWEST_TRITON) < release(NEWEST_TRITON)
    for row in ARCHITECTURES:
        assert release(LOWEST_TRITON) <= release(row.triton) <= release(NEWEST_TRITON)
