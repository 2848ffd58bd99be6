"""Which launch configs are legal where, each refusal with its sentence."""

from __future__ import annotations

import pytest

from sage_plugin import device
from sage_plugin.kernels.attention import launch_space
from sage_plugin.schema import CallKey, DeviceFacts
from tests.kernels.calls import EMULATED, HOPPER, hopper_launch, launch
from tests.kernels.devices import CPU, SMEM_KIB, claimed, facts
from tests.registry.samples import FACTS, KEY, key


@pytest.fixture(autouse=True)
def _newest_triton(monkeypatch):
    monkeypatch.setattr(device, "triton_version", lambda: "3.9.0")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"block_m": 48}, "block_m 48 is not a power of two between 16 and 256"),
        ({"block_m": 8}, "block_m 8 is not a power of two"),
        ({"block_m": 512}, "block_m 512 is not"),
        ({"block_m": 0}, "block_m 0 is not"),
        ({"block_m": -16}, "block_m -16 is not"),
        ({"block_n": 16}, "block_n 16 is not a power of two between 32 and 256"),
        ({"block_n": 96}, "block_n 96 is not"),
        ({"num_warps": 3}, "num_warps 3 is not 1, 2, 4, 8 or 16"),
        ({"num_warps": 32}, "num_warps 32 is not"),
        ({"num_stages": 0}, "num_stages 0 is not between 1 and 8"),
        ({"num_stages": 9}, "num_stages 9 is not"),
        ({"loads": "tma"}, "loads 'tma' is neither 'pointer' nor 'descriptor'"),
        ({"pv_flush": 2}, "pv_flush 2 is neither 0 nor 1"),
        ({"maxnreg": 16}, "maxnreg 16 is not between 32 and 255"),
        ({"maxnreg": 256}, "maxnreg 256 is not"),
    ],
)
def test_an_illegal_config_has_its_sentence(fields, words):
    assert words in launch_space.illegal_reason(launch(**fields), KEY, FACTS)


@pytest.mark.parametrize(
    "fields",
    [
        {"block_m": 16},
        {"block_m": 256},
        {"block_n": 256},
        {"num_warps": 1},
        {"num_warps": 16},
        {"num_stages": 8},
        {"maxnreg": 32},
        {"maxnreg": 255},
        {"pv_flush": 0},
        {"loads": "descriptor"},
        {"smooth_k": False},
    ],
    ids=str,
)
def test_the_ends_of_each_range_are_legal(fields):
    assert launch_space.illegal_reason(launch(**fields), KEY, FACTS) is None


def test_only_the_unquantized_kernel_takes_sixteen_keys_a_block():
    """INT8 and FP8 products need 32 keys; FP16 ones need 16."""
    config = launch(block_n=16)
    assert launch_space.illegal_reason(config, key(kernel="fav2"), FACTS) is None
    for kernel in ("sage", "fav3_sage", "fav3_fp8"):
        assert "block_n 16" in launch_space.illegal_reason(config, key(kernel=kernel), FACTS)


HOPPER_KEY = key(variant="hopper", head_dim=128, dv=128)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"block_m": 64, "num_warps": 4}, "block_m 64 is not 128 or 192"),
        ({"maxnreg": 100}, "maxnreg 100 is not a multiple of 8 from 128 up"),
        ({"maxnreg": 156}, "maxnreg 156 is not a multiple of 8 from 128 up"),
        ({"maxnreg": 168}, "maxnreg 168 is not a multiple of 8 from 128 up"),
        ({"block_m": 256, "num_warps": 16}, "block_m 256 is not 128 or 192"),
        ({"block_n": 32}, "block_n 32 is not 64 or 128"),
        ({"block_n": 256}, "block_n 256 is not 64 or 128"),
        ({"num_warps": 8}, "num_warps 8 is not block_m / 16, one warp to 16 rows"),
        (
            {"block_m": 128, "num_warps": 4},
            "num_warps 4 is not block_m / 16, one warp to 16 rows",
        ),
        ({"num_stages": 1}, "num_stages 1 is under 2"),
        ({"num_stages": 9}, "num_stages 9 is not between 1 and 8"),
        ({"loads": "pointer"}, "loads 'pointer' is not 'descriptor'"),
        ({"pv_flush": -1}, "pv_flush -1 is not between 0 and 4096"),
        ({"pv_flush": 4097}, "pv_flush 4097 is not between 0 and 4096"),
        *(
            (
                {"exp_linear": eighths, "block_n": block_n},
                f"exp_linear {eighths} is not a number of whole groups of 16 keys, at most 6 "
                "eighths of the block",
            )
            for eighths, block_n in ((7, 128), (8, 128), (-1, 128), (3, 64), (5, 64), (8, 64))
        ),
        ({"overlap": True}, "overlap leaves no registers at head dim 128 with blocks of 128 keys"),
        ({"hadamard": 48}, "hadamard 48 is neither 0 nor one of"),
        ({"q_granule": 3}, "q_granule 3 is not a power of two up to 128"),
        ({"maxnreg": 16}, "maxnreg 16 is not"),
        (
            {"num_stages": 5},
            "needs at least 286720 bytes of shared memory, NVIDIA H100 80GB HBM3 has 232448",
        ),
    ],
    ids=str,
)
def test_an_illegal_config_of_the_hopper_variant_has_its_sentence(fields, reason):
    found = launch_space.illegal_reason(hopper_launch(**fields), HOPPER_KEY, FACTS)
    assert found == reason or found.startswith(reason)


@pytest.mark.parametrize(
    "fields",
    [
        {"block_m": 128},
        {"block_n": 64, "num_stages": 6},
        {"num_stages": 2},
        {"pv_flush": 0, "num_stages": 6},
        {"pv_flush": 1},
        {"pv_flush": 7},
        {"pv_flush": 4096},
        *({"exp_linear": eighths} for eighths in range(7)),
        *({"exp_linear": eighths, "block_n": 64} for eighths in (2, 4, 6)),
        {"overlap": True, "block_n": 64},
        {"persistent": True},
        {"persistent": False},
        {"smooth_k": False, "smooth_v": False},
        {"hadamard": 128, "q_granule": 64},
    ],
    ids=str,
)
def test_what_is_legal_for_the_hopper_variant(fields):
    config = hopper_launch(**fields)
    assert launch_space.illegal_reason(config, HOPPER_KEY, FACTS) is None
    of = key(variant="emulation", head_dim=128, dv=128)
    assert launch_space.illegal_reason(config, of, CPU) is None


def test_an_early_start_is_legal_up_to_64_channels():
    for dim in (33, 40, 64):
        of = key(variant="hopper", head_dim=dim, dv=dim)
        assert launch_space.illegal_reason(hopper_launch(overlap=True), of, FACTS) is None
    for dim in (65, 80, 128):
        of = key(variant="hopper", head_dim=dim, dv=dim)
        assert f"at head dim {dim} with" in launch_space.illegal_reason(
            hopper_launch(overlap=True), of, FACTS
        )


def test_only_fp8_weights_are_linear():
    config, of = hopper_launch(exp_linear=4), key(kernel="sage", variant="hopper")
    reason = "exp_linear needs FP8 weights, which sage has not"
    assert launch_space.illegal_reason(config, of, FACTS) == reason
    of = key(kernel="sage", variant="emulation")
    assert launch_space.illegal_reason(config, of, FACTS) is not None
    assert launch_space.illegal_reason(config.replaced(exp_linear=0), of, FACTS) is None


@pytest.mark.parametrize(
    "fields", [{"exp_linear": 4}, {"exp_linear": 1}, {"overlap": True}, {"persistent": True}]
)
@pytest.mark.parametrize("variant", ["portable", "emulation"])
def test_the_portable_variant_has_nothing_of_the_hopper_variants(fields, variant):
    reason = launch_space.illegal_reason(launch(**fields), key(variant=variant), FACTS)
    assert reason == "exp_linear, overlap and persistent belong to the Hopper variants"


def test_a_config_of_one_variant_is_not_that_of_the_other():
    portable, hopper = key(head_dim=128, dv=128), HOPPER_KEY
    assert launch_space.illegal_reason(hopper_launch(), portable, FACTS) == (
        "block_m 192 is not a power of two between 16 and 256"
    )
    default = launch_space.default_launch(portable, FACTS)
    assert launch_space.illegal_reason(default, hopper, FACTS) == "block_m 64 is not 128 or 192"


@pytest.mark.parametrize("kernel", EMULATED)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_the_emulation_takes_the_default_of_every_variant(kernel, arch):
    """`sage accuracy` and the tests on a GPU run the emulation by the config of the variant."""
    where = facts(arch)
    for dim in (64, 128):
        of = key(kernel=kernel, head_dim=dim, dv=dim)
        if kernel not in claimed(arch):
            continue
        variants = ("portable", "hopper") if arch == "sm_90" and kernel in HOPPER else ("portable",)
        for variant in variants:
            named = CallKey(**{**of.to_json(), "variant": variant})
            emulation = CallKey(**{**of.to_json(), "variant": "emulation"})
            for config in launch_space.candidates(named, where):
                assert launch_space.illegal_reason(config, emulation, CPU) is None, config


@pytest.mark.parametrize("arch", SMEM_KIB)
def test_descriptors_need_tma(arch):
    reason = launch_space.illegal_reason(launch(loads="descriptor"), KEY, facts(arch))
    has_tma = arch.startswith("sm_") and arch not in ("sm_80", "sm_86", "sm_87", "sm_89")
    assert reason == (
        None if has_tma else f"loads 'descriptor' needs TMA, which {arch} does not have"
    )


def test_report_109_amd_has_at_most_two_stages():
    for arch in ("gfx942", "gfx1201"):
        assert launch_space.illegal_reason(launch(num_stages=2), KEY, facts(arch)) is None
        assert "on AMD is limited to 2" in launch_space.illegal_reason(
            launch(num_stages=3), KEY, facts(arch)
        )


@pytest.mark.parametrize(
    ("kernel", "dtype", "dim", "stages", "expected"),
    [
        ("fav3_sage", "bfloat16", 128, 1, 0),
        ("fav3_sage", "float32", 128, 2, 64 * 128 * 2),
        ("fav3_sage", "bfloat16", 128, 4, 3 * 64 * 128 * 2),
        ("sage", "bfloat16", 128, 3, 2 * 64 * 128 * 3),
        ("fav2", "bfloat16", 128, 3, 2 * 64 * 128 * 4),
        ("fav2", "float32", 128, 2, 64 * 128 * 8),
        ("fav3_fp8", "float16", 80, 2, 64 * 128 * 2),
        ("fav3_fp8", "float16", 8, 2, 64 * 16 * 2),
        ("fav3_fp8", "float16", 65, 2, 64 * 128 * 2),
    ],
)
def test_the_shared_memory_that_a_launch_needs_at_least(kernel, dtype, dim, stages, expected):
    config = launch(block_n=64, num_stages=stages)
    of = key(kernel=kernel, dtype=dtype, head_dim=dim, dv=dim)
    assert launch_space.smem_lower_bound(config, of) == expected


@pytest.mark.parametrize(
    ("kernel", "dim", "fields", "expected"),
    [
        # Q, then the ring of K and V, then fp32 totals.
        ("fav3_sage", 128, {}, 192 * 128 + 3 * 128 * 128 * 2 + 192 * 128 * 4),
        ("fav3_sage", 128, {"pv_flush": 0}, 192 * 128 + 3 * 128 * 128 * 2),
        ("fav3_fp8", 80, {"block_m": 128}, 128 * 128 + 3 * 128 * 128 * 2 + 128 * 128 * 4),
        ("fav3_fp8", 64, {"num_stages": 4}, 192 * 64 + 4 * 128 * 64 * 2 + 192 * 64 * 4),
        ("fav3_fp8", 33, {"block_n": 64}, 192 * 64 + 3 * 64 * 64 * 2 + 192 * 64 * 4),
        ("sage", 64, {"pv_flush": 0}, 192 * 64 + 3 * 128 * 64 * 3),
    ],
)
def test_the_shared_memory_of_a_hopper_launch(kernel, dim, fields, expected):
    of = key(kernel=kernel, variant="hopper", head_dim=dim, dv=dim)
    assert launch_space.smem_lower_bound(hopper_launch(**fields), of) == expected


def test_report_118_a_config_of_a_larger_gpu_is_illegal_on_a_smaller_one():
    config = launch(128, 128, num_stages=3)
    of = key(kernel="fav2", head_dim=128, dv=128)
    assert launch_space.illegal_reason(config, of, facts("sm_90")) is None
    assert launch_space.illegal_reason(config, of, facts("sm_89")) == (
        "needs at least 131072 bytes of shared memory, Test sm_89 has 101376"
    )
    assert launch_space.illegal_reason(config, key(kernel="fav2", variant="emulation"), CPU) is None


@pytest.mark.parametrize(
    ("arch", "kind", "field", "value"),
    [
        ("sm_90", "cuda", "waves_per_eu", 2),
        ("sm_90", "cuda", "matrix_instr_nonkdim", 16),
        ("gfx942", "hip", "maxnreg", 128),
        ("gfx942", "hip", "waves_per_eu", -3),
        ("gfx942", "hip", "matrix_instr_nonkdim", 7),
    ],
)
def test_options_of_another_vendors_compiler_are_illegal(arch, kind, field, value):
    facts = DeviceFacts("x", "x", kind, arch, 1, 0, 0, "float8_e4m3fn")
    key = CallKey("sage", "portable", 64, 64, "float16", 1, False, "none", "bhsd", 64, 64, 1)
    fine = launch(128, 64, num_stages=1)
    assert launch_space.illegal_reason(fine, key, facts) is None
    assert field in launch_space.illegal_reason(fine.replaced(**{field: value}), key, facts)
