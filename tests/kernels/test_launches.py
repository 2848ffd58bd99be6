"""Launch configs: what is legal, the defaults of every architecture, and the look-up of a call."""

from __future__ import annotations

import logging
import shlex

import pytest
from typer.testing import CliRunner

from sage_plugin import device
from sage_plugin.cli import app
from sage_plugin.cli import tune as tune_command
from sage_plugin.errors import ConfigError, UsageError
from sage_plugin.kernels import dispatch, launches
from sage_plugin.registry.merge import merge
from sage_plugin.schema import CallKey, DeviceFacts
from tests.kernels.calls import EMULATED, FP8_WEIGHTS, HOPPER, hopper_launch, launch
from tests.registry.samples import CONFIG, FACTS, KEY, TOOLCHAIN, entry, key

KIB = 2**10
SMEM_KIB = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_87": 163,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_103": 227,
    "sm_110": 227,
    "sm_120": 99,
    "sm_121": 99,
    "gfx942": 64,
    "gfx950": 160,
    "gfx1100": 64,
    "gfx1151": 64,
    "gfx1201": 64,
}
DIMS = (8, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256)
DTYPES = ("float16", "bfloat16", "float32")
CPU = device.facts("cpu")


def facts(arch: str) -> DeviceFacts:
    """A device by architecture, with its real limit of shared memory."""
    return DeviceFacts(
        slug=f"test-{arch.replace('_', '-')}",
        name=f"Test {arch}",
        kind="hip" if arch.startswith("gfx") else "cuda",
        arch=arch,
        sm_count=100,
        memory_bytes=2**34,
        smem_bytes=SMEM_KIB[arch] * KIB,
        fp8_dtype=device.fp8_dtype(arch),
    )


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    for name in ("CONFIG_DIR", "KERNEL", "VARIANT", "LAUNCH"):
        monkeypatch.delenv(f"SAGE_PLUGIN_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(device, "triton_version", lambda: "3.9.0")
    launches.forget()
    yield
    launches.forget()
    device.toolchain.cache_clear()


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "sage_plugin")
    return lambda: [record.getMessage() for record in caplog.records]


def claimed(arch: str) -> list[str]:
    """The kernels with a launch config that a device runs."""
    return [k for k in dispatch.kernels_of(facts(arch)) if k in EMULATED]


# -- legality ---------------------------------------------------------------------------------


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
    assert words in launches.illegal_reason(launch(**fields), KEY, FACTS)


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
    assert launches.illegal_reason(launch(**fields), KEY, FACTS) is None


def test_only_the_unquantised_kernel_takes_sixteen_keys_a_block():
    """INT8 and FP8 products need 32 keys; FP16 ones need 16."""
    config = launch(block_n=16)
    assert launches.illegal_reason(config, key(kernel="fav2"), FACTS) is None
    for kernel in ("sage", "fav3_sage", "fav3_fp8"):
        assert "block_n 16" in launches.illegal_reason(config, key(kernel=kernel), FACTS)


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
    found = launches.illegal_reason(hopper_launch(**fields), HOPPER_KEY, FACTS)
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
        {"smooth_k": False, "smooth_v": False},
        {"hadamard": 128, "q_granule": 64},
    ],
    ids=str,
)
def test_what_is_legal_for_the_hopper_variant(fields):
    config = hopper_launch(**fields)
    assert launches.illegal_reason(config, HOPPER_KEY, FACTS) is None
    of = key(variant="emulation", head_dim=128, dv=128)
    assert launches.illegal_reason(config, of, CPU) is None


def test_an_early_start_is_legal_up_to_64_channels():
    for dim in (33, 40, 64):
        of = key(variant="hopper", head_dim=dim, dv=dim)
        assert launches.illegal_reason(hopper_launch(overlap=True), of, FACTS) is None
    for dim in (65, 80, 128):
        of = key(variant="hopper", head_dim=dim, dv=dim)
        assert f"at head dim {dim} with" in launches.illegal_reason(
            hopper_launch(overlap=True), of, FACTS
        )


def test_only_fp8_weights_are_linear():
    config, of = hopper_launch(exp_linear=4), key(kernel="sage", variant="hopper")
    reason = "exp_linear needs FP8 weights, which sage has not"
    assert launches.illegal_reason(config, of, FACTS) == reason
    of = key(kernel="sage", variant="emulation")
    assert launches.illegal_reason(config, of, FACTS) is not None
    assert launches.illegal_reason(config.replaced(exp_linear=0), of, FACTS) is None


@pytest.mark.parametrize("fields", [{"exp_linear": 4}, {"exp_linear": 1}, {"overlap": True}])
@pytest.mark.parametrize("variant", ["portable", "emulation"])
def test_the_portable_variant_has_no_linear_weights_and_no_early_start(fields, variant):
    reason = launches.illegal_reason(launch(**fields), key(variant=variant), FACTS)
    assert reason == "exp_linear and overlap belong to the Hopper variants"


def test_a_config_of_one_variant_is_not_that_of_the_other():
    portable, hopper = key(head_dim=128, dv=128), HOPPER_KEY
    assert launches.illegal_reason(hopper_launch(), portable, FACTS) == (
        "block_m 192 is not a power of two between 16 and 256"
    )
    default = launches.default_launch(portable, FACTS)
    assert launches.illegal_reason(default, hopper, FACTS) == "block_m 64 is not 128 or 192"


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
            for config in launches.candidates(named, where):
                assert launches.illegal_reason(config, emulation, CPU) is None, config


@pytest.mark.parametrize("arch", SMEM_KIB)
def test_descriptors_need_tma(arch):
    reason = launches.illegal_reason(launch(loads="descriptor"), KEY, facts(arch))
    has_tma = arch.startswith("sm_") and arch not in ("sm_80", "sm_86", "sm_87", "sm_89")
    assert reason == (
        None if has_tma else f"loads 'descriptor' needs TMA, which {arch} does not have"
    )


def test_report_109_amd_has_at_most_two_stages():
    for arch in ("gfx942", "gfx1201"):
        assert launches.illegal_reason(launch(num_stages=2), KEY, facts(arch)) is None
        assert "on AMD is limited to 2" in launches.illegal_reason(
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
    assert launches.smem_lower_bound(config, of) == expected


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
    assert launches.smem_lower_bound(hopper_launch(**fields), of) == expected


def test_report_118_a_config_of_a_larger_gpu_is_illegal_on_a_smaller_one():
    config = launch(128, 128, num_stages=3)
    of = key(kernel="fav2", head_dim=128, dv=128)
    assert launches.illegal_reason(config, of, facts("sm_90")) is None
    assert launches.illegal_reason(config, of, facts("sm_89")) == (
        "needs at least 131072 bytes of shared memory, Test sm_89 has 101376"
    )
    assert launches.illegal_reason(config, key(kernel="fav2", variant="emulation"), CPU) is None


# -- defaults and candidates ------------------------------------------------------------------


@pytest.mark.parametrize("arch", SMEM_KIB)
def test_report_112_every_claimed_call_has_a_legal_default(arch):
    where = facts(arch)
    assert claimed(arch)[:2] == ["fav2", "sage"]
    for kernel in claimed(arch):
        for dim in DIMS:
            for dtype in DTYPES:
                of = key(kernel=kernel, head_dim=dim, dv=dim, dtype=dtype)
                default = launches.default_launch(of, where)
                assert launches.illegal_reason(default, of, where) is None, (kernel, dim, dtype)


@pytest.mark.parametrize("arch", SMEM_KIB)
def test_candidates_are_legal_distinct_and_start_with_the_default(arch):
    where = facts(arch)
    for kernel in claimed(arch):
        for dim in (40, 64, 128, 256):
            of = key(kernel=kernel, head_dim=dim, dv=dim)
            found = launches.candidates(of, where)
            assert found[0] == launches.default_launch(of, where)
            assert len(set(found)) == len(found)
            assert all(launches.illegal_reason(c, of, where) is None for c in found)
            if dim <= 128:
                assert len(found) >= 3, (kernel, dim)


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("dim", [33, 64, 80, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_kind", ["none", "key_bias"])
def test_candidates_of_a_hopper_variant_are_legal_and_fit(kernel, dim, dtype, mask_kind):
    of = key(
        kernel=kernel, variant="hopper", head_dim=dim, dv=dim, dtype=dtype, mask_kind=mask_kind
    )
    found = launches.candidates(of, FACTS)
    assert found[0] == launches.default_launch(of, FACTS)
    assert len(set(found)) == len(found) >= 3
    for config in found:
        assert launches.illegal_reason(config, of, FACTS) is None
        # What the bound leaves out takes up to 2 KiB (test_aot_hopper).
        assert launches.smem_lower_bound(config, of) + 2048 <= 232_448
        assert config.block_m in (128, 192)
        assert config.exp_linear > 0 or kernel not in FP8_WEIGHTS


def test_a_hopper_variant_has_no_config_elsewhere():
    for arch in ("sm_100", "sm_89"):
        with pytest.raises(ConfigError, match=rf"fav3_sage:hopper has no launch config for {arch}"):
            launches.default_launch(key(variant="hopper"), facts(arch))
    for changes in ({"head_dim": 256}, {"mask_kind": "dense"}):
        with pytest.raises(ConfigError, match="fav3_sage:hopper has no launch config for sm_90"):
            launches.default_launch(key(variant="hopper", **changes), FACTS)


def test_a_miss_of_a_hopper_variant_names_it(warnings):
    of = key(variant="hopper")
    assert launches.find_launch(of, FACTS).config == launches.default_launch(of, FACTS)
    (text,) = warnings()
    assert "no tuned config for fav3_sage:hopper" in text
    assert "`sage tune --kernel fav3_sage:hopper " in text


def test_the_environment_changes_the_fields_of_a_hopper_config(monkeypatch):
    of = key(variant="hopper")
    monkeypatch.setenv("SAGE_PLUGIN_LAUNCH", '{"exp_linear": 6, "pv_flush": 16}')
    found = launches.find_launch(of, FACTS).config
    assert (found.exp_linear, found.pv_flush) == (6, 16)
    monkeypatch.setenv("SAGE_PLUGIN_LAUNCH", '{"exp_linear": 7}')
    with pytest.raises(ConfigError, match="cannot run: exp_linear 7 is not"):
        launches.find_launch(of, FACTS)


def test_a_tuned_config_of_one_variant_is_not_found_for_the_other(tmp_path):
    of, config = key(variant="hopper"), hopper_launch(exp_linear=6, pv_flush=16)
    folder = write(tmp_path, entry(), entry(of, config))
    assert launches.find_launch(of, FACTS, config_dir=folder).config == config
    assert launches.find_launch(KEY, FACTS, config_dir=folder).config == CONFIG


def test_illegal_candidates_are_left_out():
    of = key(kernel="sage", head_dim=128, dv=128)
    small, large = (launches.candidates(of, facts(arch)) for arch in ("sm_86", "sm_80"))
    assert set(small) < set(large)
    assert all(launches.smem_lower_bound(c, of) <= 99 * KIB for c in small)


@pytest.mark.parametrize("kernel", EMULATED)
def test_an_emulation_has_a_default_and_candidates_everywhere(kernel):
    of = key(kernel=kernel, variant="emulation")
    for where in (CPU, FACTS):
        assert launches.candidates(of, where)[0].loads == "pointer"
        assert launches.candidates(of, where)[0] == launches.default_launch(of, CPU)
    assert len(launches.candidates(of, CPU)) == 3


def test_a_call_without_any_config_is_an_error_that_says_what_to_do():
    with pytest.raises(ConfigError, match=r"sage:portable has no launch config.*'sdpa'"):
        launches.default_launch(key(kernel="sage", head_dim=512), FACTS)


# -- the command of a miss --------------------------------------------------------------------


@pytest.mark.parametrize(
    "of",
    [
        KEY,
        key(kernel="sage", causal=True, layout="bshd", dtype="float16"),
        key(kernel="fav2", gqa_ratio=4, batch_heads=32, seq_k=300, dtype="float32"),
        key(head_dim=128, dv=128, seq_q=17776, seq_k=226, batch_heads=60),
        key(mask_kind="key_bias"),
        key(kernel="sage", causal=True, mask_kind="dense"),
    ],
    ids=str,
)
def test_the_tune_command_of_a_miss_tunes_that_very_key(of, monkeypatch, tmp_path):
    assert launches.tune_command(of).startswith(f"sage tune --kernel {of.kernel}:portable ")
    of = CallKey(**{**of.to_json(), "variant": "emulation"})  # which a CPU tunes
    monkeypatch.chdir(tmp_path)
    plans = []
    monkeypatch.setattr(tune_command, "_show_plan", plans.append)
    program, *words = shlex.split(launches.tune_command(of))
    assert program == "sage"
    result = CliRunner().invoke(app, [*words, "--dry-run", "--device", "cpu"])
    assert result.exit_code == 0, result.stderr
    assert [study.key for study in plans[0].studies] == [of]


def test_a_miss_on_a_gpu_is_warned_about_once(warnings):
    found = launches.find_launch(KEY, FACTS)
    assert found.source == "default"
    assert found.detail == "default of sm_90"
    assert found.config == launches.default_launch(KEY, FACTS)
    (text,) = warnings()
    assert "fav3_sage:portable" in text
    assert f"`{launches.tune_command(KEY)}`" in text
    assert FACTS.name in text
    launches.find_launch(KEY, FACTS)
    launches.find_launch(key(seq_q=2048), FACTS)
    launches.find_launch(key(batch_heads=99), FACTS)
    assert len(warnings()) == 1
    launches.find_launch(key(causal=True), FACTS)
    launches.find_launch(KEY, facts("sm_89"))
    assert len(warnings()) == 3
    launches.forget()
    launches.find_launch(KEY, FACTS)
    assert len(warnings()) == 4


def test_a_cpu_misses_in_silence(warnings):
    found = launches.find_launch(key(variant="emulation"), CPU)
    assert found.source == "default"
    assert warnings() == []


# -- the registry -----------------------------------------------------------------------------


def write(folder, *entries) -> str:
    """A registry file of `FACTS` in `folder`, as `sage tune` writes it."""
    path = folder / FACTS.slug / "attention.json"
    merge(path, list(entries), family="attention", facts=FACTS, toolchain=TOOLCHAIN)
    return str(folder)


def test_a_tuned_config_is_found_exactly_and_nearby(tmp_path, warnings):
    other = CONFIG.replaced(num_stages=2)
    folder = write(tmp_path, entry(), entry(key(seq_q=4096, seq_k=4096), other))
    found = launches.find_launch(KEY, FACTS, config_dir=folder)
    assert (found.config, found.source) == (CONFIG, "exact")
    assert found.detail == f"argument: {tmp_path / FACTS.slug / 'attention.json'}"
    near = launches.find_launch(key(seq_q=3000, seq_k=3000), FACTS, config_dir=folder)
    assert (near.config, near.source) == (other, "near")
    far = launches.find_launch(key(seq_q=30000, seq_k=30000), FACTS, config_dir=folder)
    assert far.source == "default"
    assert len(warnings()) == 1


def test_another_devices_configs_are_never_used(tmp_path):
    folder = write(tmp_path, entry())
    assert launches.find_launch(KEY, facts("sm_90"), config_dir=folder).source == "default"


def test_a_tuned_config_that_this_call_cannot_run_is_passed_over(tmp_path):
    of, config = key(kernel="sage"), CONFIG.replaced(block_n=256, num_stages=8)
    assert "shared memory" in launches.illegal_reason(config, of, FACTS)
    folder = write(tmp_path, entry(of, config))
    found = launches.find_launch(of, FACTS, config_dir=folder)
    assert found.source == "default"
    assert launches.illegal_reason(found.config, of, FACTS) is None


def test_what_was_found_is_remembered_until_forgotten(tmp_path):
    folder = write(tmp_path, entry())
    path = tmp_path / FACTS.slug / "attention.json"
    first = launches.find_launch(KEY, FACTS, config_dir=folder)
    path.unlink()
    assert launches.find_launch(KEY, FACTS, config_dir=folder) is first
    launches.forget()
    assert launches.find_launch(KEY, FACTS, config_dir=folder).source == "default"
    write(tmp_path, entry())
    assert launches.find_launch(KEY, FACTS, config_dir=folder).source == "default"
    launches.forget()
    assert launches.find_launch(KEY, FACTS, config_dir=folder).source == "exact"


def test_the_folder_and_the_device_are_part_of_what_is_remembered(tmp_path):
    folder = write(tmp_path, entry())
    assert launches.find_launch(KEY, FACTS).source == "default"
    assert launches.find_launch(KEY, FACTS, config_dir=folder).source == "exact"
    assert launches.find_launch(KEY, facts("sm_89"), config_dir=folder).source == "default"


def test_a_folder_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_PLUGIN_CONFIG_DIR", write(tmp_path, entry()))
    found = launches.find_launch(KEY, FACTS)
    assert (found.config, found.source) == (CONFIG, "exact")
    assert found.detail.startswith("env: ")


def test_the_memo_of_a_language_model_does_not_grow_for_ever(monkeypatch):
    monkeypatch.setattr(launches, "MEMO_LIMIT", 10)
    of = [key(variant="emulation", seq_k=n) for n in range(1, 36)]
    for one in of:
        launches.find_launch(one, CPU)
        assert len(launches._memo) <= 10
    last = launches.find_launch(of[-1], CPU)
    assert launches.find_launch(of[-1], CPU) is last


# -- the environment's override ---------------------------------------------------------------


def test_the_override_changes_its_fields_and_no_others(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGE_PLUGIN_LAUNCH", '{"num_warps": 8, "smooth_k": false}')
    default = launches.default_launch(KEY, FACTS)
    found = launches.find_launch(KEY, FACTS)
    assert found.source == "env"
    assert found.detail == "SAGE_PLUGIN_LAUNCH over default of sm_90"
    assert found.config == default.replaced(num_warps=8, smooth_k=False)
    assert found.config != default
    tuned = launches.find_launch(KEY, FACTS, config_dir=write(tmp_path, entry()))
    assert tuned.config == CONFIG.replaced(num_warps=8, smooth_k=False)
    assert "over argument: " in tuned.detail


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_warps=8", "SAGE_PLUGIN_LAUNCH is not JSON"),
        ("[1]", "SAGE_PLUGIN_LAUNCH is list, expected a JSON object"),
        ("8", "SAGE_PLUGIN_LAUNCH is int"),
        ('{"BLOCK_M": 64}', "SAGE_PLUGIN_LAUNCH.*unknown field 'BLOCK_M'; allowed: block_m"),
        ('{"num_warps": "8"}', "SAGE_PLUGIN_LAUNCH.*num_warps: got '8'"),
        ('{"num_warps": true}', "SAGE_PLUGIN_LAUNCH.*num_warps: got True"),
        ('{"num_warps": 5}', "SAGE_PLUGIN_LAUNCH.*H100.*num_warps 5 is not 1, 2, 4, 8 or 16"),
        ('{"num_stages": 8, "block_n": 256}', "SAGE_PLUGIN_LAUNCH.*bytes of shared memory"),
        ('{"self": 8}', "SAGE_PLUGIN_LAUNCH.*unknown field 'self'"),
    ],
)
def test_a_wrong_override_is_an_error_that_names_the_variable(monkeypatch, text, words):
    monkeypatch.setenv("SAGE_PLUGIN_LAUNCH", text)
    of = key(kernel="sage")
    with pytest.raises(ConfigError, match=words) as error:
        launches.find_launch(of, FACTS)
    assert isinstance(error.value, UsageError)
    with pytest.raises(ConfigError):  # an error is not remembered as an answer
        launches.find_launch(of, FACTS)


def test_a_key_is_hashable_and_equal_by_value():
    assert CallKey.from_json(KEY.to_json()) == KEY
    assert hash(CallKey.from_json(KEY.to_json())) == hash(KEY)


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
    assert launches.illegal_reason(fine, key, facts) is None
    assert field in launches.illegal_reason(fine.replaced(**{field: value}), key, facts)
