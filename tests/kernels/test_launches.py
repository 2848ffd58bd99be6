"""Launch configs: the defaults of every architecture, and the look-up of a call."""

from __future__ import annotations

import logging
import shlex

import pytest
from typer.testing import CliRunner

from sage_plugin import device
from sage_plugin.cli import app
from sage_plugin.cli import tune as tune_command
from sage_plugin.errors import ConfigError, UsageError
from sage_plugin.kernels import launch_config
from sage_plugin.kernels.attention import launch_space
from sage_plugin.schema import CallKey, LaunchConfig
from tests.kernels.calls import EMULATED, FP8_WEIGHTS, HOPPER, hopper_launch
from tests.kernels.devices import CPU, KIB, SMEM_KIB, claimed, facts
from tests.registry.samples import CONFIG, FACTS, KEY, entry, key, merged

DTYPES = ("float16", "bfloat16", "float32")


@pytest.fixture(autouse=True)
def _alone(unconfigured, monkeypatch):
    monkeypatch.setattr(device, "triton_version", lambda: "3.9.0")
    yield
    device.toolchain.cache_clear()


@pytest.fixture
def warnings(caplog):
    """Messages of a level so far."""
    caplog.set_level(logging.INFO, "sage_plugin")

    def messages(level="WARNING"):
        return [r.getMessage() for r in caplog.records if r.levelname == level]

    return messages


# -- defaults and candidates ------------------------------------------------------------------


@pytest.mark.parametrize("arch", SMEM_KIB)
def test_candidates_are_legal_distinct_and_start_with_the_default(arch):
    where = facts(arch)
    for kernel in claimed(arch):
        for dim in (40, 64, 128, 256):
            of = key(kernel=kernel, head_dim=dim, dv=dim)
            found = launch_space.candidates(of, where)
            assert found[0] == launch_space.default_launch(of, where)
            assert len(set(found)) == len(found)
            assert all(launch_space.illegal_reason(c, of, where) is None for c in found)
            if dim <= 128 or arch in ("sm_80", "sm_90", "gfx942", "gfx1201"):
                assert len(found) >= 3, (kernel, dim)


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("dim", [33, 64, 80, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_kind", ["none", "key_bias"])
def test_candidates_of_a_hopper_variant_are_legal_and_fit(kernel, dim, dtype, mask_kind):
    of = key(
        kernel=kernel, variant="hopper", head_dim=dim, dv=dim, dtype=dtype, mask_kind=mask_kind
    )
    found = launch_space.candidates(of, FACTS)
    assert found[0] == launch_space.default_launch(of, FACTS)
    assert len(set(found)) == len(found) >= 3
    for config in found:
        assert launch_space.illegal_reason(config, of, FACTS) is None
        # What the bound leaves out takes up to 2 KiB (test_aot_hopper).
        assert launch_space.smem_lower_bound(config, of) + 2048 <= 232_448
    axes = {name: {getattr(c, name) for c in found} for name in LaunchConfig.__annotations__}
    assert axes["smooth_k"] == axes["persistent"] == {True, False}
    assert axes["q_granule"] == {1, 16}
    assert axes["block_m"] == {128, 192}
    assert axes["hadamard"] == ({0, 64} if dim % 64 == 0 else {0})
    fp8 = kernel in FP8_WEIGHTS
    assert axes["smooth_v"] == ({True, False} if fp8 else {False})
    assert axes["exp_linear"] == ({0, 4, 6} if fp8 else {0})
    assert axes["pv_flush"] == ({4, 8, 32} if fp8 else {0, 8, 32})
    assert axes["overlap"] == ({False} if fp8 and dim > 64 else {False, True})


def test_tiles_of_causal_calls_have_a_program_each_whatever_the_config():
    of, causal = (key(variant="hopper", causal=causal) for causal in (False, True))
    assert {c.persistent for c in launch_space.candidates(of, FACTS)} == {False, True}
    default = launch_space.default_launch(causal, FACTS)
    assert {c.persistent for c in launch_space.candidates(causal, FACTS)} == {default.persistent}


def test_a_hopper_variant_has_no_config_elsewhere():
    for arch in ("sm_100", "sm_89"):
        with pytest.raises(ConfigError, match=rf"fav3_sage:hopper has no launch config for {arch}"):
            launch_space.default_launch(key(variant="hopper"), facts(arch))
    for changes in ({"head_dim": 256}, {"mask_kind": "dense"}):
        with pytest.raises(ConfigError, match="fav3_sage:hopper has no launch config for sm_90"):
            launch_space.default_launch(key(variant="hopper", **changes), FACTS)


def test_a_miss_of_a_hopper_variant_names_it(warnings):
    of = key(variant="hopper")
    assert launch_space.find_launch(of, FACTS).config == launch_space.default_launch(of, FACTS)
    (text,) = warnings()
    assert "the first of them of fav3_sage:hopper" in text
    (text,) = warnings("INFO")
    assert "no tuned config for fav3_sage:hopper" in text
    assert "`sage tune --kernel fav3_sage:hopper " in text


def test_the_environment_changes_the_fields_of_a_hopper_config(monkeypatch):
    of = key(variant="hopper")
    monkeypatch.setenv("SAGE_PLUGIN_LAUNCH", '{"exp_linear": 6, "pv_flush": 16}')
    found = launch_space.find_launch(of, FACTS).config
    assert (found.exp_linear, found.pv_flush) == (6, 16)
    monkeypatch.setenv("SAGE_PLUGIN_LAUNCH", '{"exp_linear": 7}')
    with pytest.raises(ConfigError, match="cannot run: exp_linear 7 is not"):
        launch_space.find_launch(of, FACTS)


def test_a_tuned_config_of_one_variant_is_not_found_for_the_other(tmp_path):
    of, config = key(variant="hopper"), hopper_launch(exp_linear=6, pv_flush=16)
    folder = write(tmp_path, entry(), entry(of, config))
    assert launch_space.find_launch(of, FACTS, config_dir=folder).config == config
    assert launch_space.find_launch(KEY, FACTS, config_dir=folder).config == CONFIG


def test_illegal_candidates_are_left_out():
    of = key(kernel="sage", head_dim=128, dv=128)
    small, large = (launch_space.candidates(of, facts(arch)) for arch in ("sm_86", "sm_80"))
    assert set(small) < set(large)
    assert all(launch_space.smem_lower_bound(c, of) <= 99 * KIB for c in small)


@pytest.mark.parametrize("kernel", EMULATED)
def test_an_emulation_has_a_default_and_candidates_everywhere(kernel):
    of = key(kernel=kernel, variant="emulation")
    for where in (CPU, FACTS):
        assert launch_space.candidates(of, where)[0].loads == "pointer"
        assert launch_space.candidates(of, where)[0] == launch_space.default_launch(of, CPU)
    assert len(launch_space.candidates(of, CPU)) == 3


def test_a_call_without_any_config_is_an_error_that_says_what_to_do():
    with pytest.raises(ConfigError, match=r"sage:portable has no launch config.*'sdpa'"):
        launch_space.default_launch(key(kernel="sage", head_dim=512), FACTS)


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
    assert launch_space.tune_command(of).startswith(f"sage tune --kernel {of.kernel}:portable ")
    of = CallKey(**{**of.to_json(), "variant": "emulation"})  # which a CPU tunes
    monkeypatch.chdir(tmp_path)
    plans = []
    monkeypatch.setattr(tune_command, "_show_plan", plans.append)
    program, *words = shlex.split(launch_space.tune_command(of))
    assert program == "sage"
    result = CliRunner().invoke(app, [*words, "--dry-run", "--device", "cpu"])
    assert result.exit_code == 0, result.stderr
    assert [study.key for study in plans[0].studies] == [of]


def test_report_406_misses_on_gpus_are_one_warning_a_process_and_a_detail_each(warnings):
    found = launch_space.find_launch(KEY, FACTS)
    assert found.source == "default"
    assert found.detail == "default of sm_90"
    assert found.config == launch_space.default_launch(KEY, FACTS)
    (text,) = warnings()
    assert "fav3_sage:portable" in text
    assert "`sage capture SCRIPT.py && sage tune captured_inputs` fills all" in text
    assert FACTS.name in text
    (text,) = warnings("INFO")
    assert f"`{launch_space.tune_command(KEY)}`" in text
    launch_space.find_launch(KEY, FACTS)
    launch_space.find_launch(key(seq_q=2048), FACTS)
    launch_space.find_launch(key(batch_heads=99), FACTS)
    assert (len(warnings()), len(warnings("INFO"))) == (1, 1)
    launch_space.find_launch(key(causal=True), FACTS)
    launch_space.find_launch(KEY, facts("sm_89"))
    assert (len(warnings()), len(warnings("INFO"))) == (1, 3)
    launch_config.forget()
    launch_space.find_launch(KEY, FACTS)
    assert (len(warnings()), len(warnings("INFO"))) == (1, 4)


def test_a_cpu_misses_in_silence(warnings):
    found = launch_space.find_launch(key(variant="emulation"), CPU)
    assert found.source == "default"
    assert warnings() == []


# -- the registry -----------------------------------------------------------------------------


def write(folder, *entries) -> str:
    """A registry file of `FACTS` in `folder`, as `sage tune` writes it."""
    merged(folder / FACTS.slug / "attention.json", *entries)
    return str(folder)


def test_a_tuned_config_is_found_exactly_and_nearby(tmp_path, warnings):
    other = CONFIG.replaced(num_stages=2)
    folder = write(tmp_path, entry(), entry(key(seq_q=4096, seq_k=4096), other))
    found = launch_space.find_launch(KEY, FACTS, config_dir=folder)
    assert (found.config, found.source) == (CONFIG, "exact")
    assert found.detail == f"argument: {tmp_path / FACTS.slug / 'attention.json'}"
    near = launch_space.find_launch(key(seq_q=3000, seq_k=3000), FACTS, config_dir=folder)
    assert (near.config, near.source) == (other, "near")
    far = launch_space.find_launch(key(seq_q=300_000, seq_k=300_000), FACTS, config_dir=folder)
    assert far.source == "default"
    assert len(warnings()) == 1


def test_another_devices_configs_are_never_used(tmp_path):
    folder = write(tmp_path, entry())
    assert launch_space.find_launch(KEY, facts("sm_90"), config_dir=folder).source == "default"


def test_a_tuned_config_that_this_call_cannot_run_is_passed_over(tmp_path):
    of, config = key(kernel="sage"), CONFIG.replaced(block_n=256, num_stages=8)
    assert "shared memory" in launch_space.illegal_reason(config, of, FACTS)
    folder = write(tmp_path, entry(of, config))
    found = launch_space.find_launch(of, FACTS, config_dir=folder)
    assert found.source == "default"
    assert launch_space.illegal_reason(found.config, of, FACTS) is None


def test_what_was_found_is_remembered_until_forgotten(tmp_path):
    folder = write(tmp_path, entry())
    path = tmp_path / FACTS.slug / "attention.json"
    first = launch_space.find_launch(KEY, FACTS, config_dir=folder)
    path.unlink()
    assert launch_space.find_launch(KEY, FACTS, config_dir=folder) is first
    launch_config.forget()
    assert launch_space.find_launch(KEY, FACTS, config_dir=folder).source == "default"
    write(tmp_path, entry())
    assert launch_space.find_launch(KEY, FACTS, config_dir=folder).source == "default"
    launch_config.forget()
    assert launch_space.find_launch(KEY, FACTS, config_dir=folder).source == "exact"


def test_the_folder_and_the_device_are_part_of_what_is_remembered(tmp_path):
    folder = write(tmp_path, entry())
    assert launch_space.find_launch(KEY, FACTS).source == "default"
    assert launch_space.find_launch(KEY, FACTS, config_dir=folder).source == "exact"
    assert launch_space.find_launch(KEY, facts("sm_89"), config_dir=folder).source == "default"


def test_a_folder_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_PLUGIN_CONFIG_DIR", write(tmp_path, entry()))
    found = launch_space.find_launch(KEY, FACTS)
    assert (found.config, found.source) == (CONFIG, "exact")
    assert found.detail.startswith("env: ")


def test_the_memo_of_a_language_model_does_not_grow_for_ever(monkeypatch):
    monkeypatch.setattr(launch_config, "MEMO_LIMIT", 10)
    of = [key(variant="emulation", seq_k=n) for n in range(1, 36)]
    for one in of:
        launch_space.find_launch(one, CPU)
        assert len(launch_config._memo) <= 10
    last = launch_space.find_launch(of[-1], CPU)
    assert launch_space.find_launch(of[-1], CPU) is last


# -- the environment's override ---------------------------------------------------------------


def test_the_override_changes_its_fields_and_no_others(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGE_PLUGIN_LAUNCH", '{"num_warps": 8, "smooth_k": false}')
    default = launch_space.default_launch(KEY, FACTS)
    found = launch_space.find_launch(KEY, FACTS)
    assert found.source == "env"
    assert found.detail == "SAGE_PLUGIN_LAUNCH over default of sm_90"
    assert found.config == default.replaced(num_warps=8, smooth_k=False)
    assert found.config != default
    tuned = launch_space.find_launch(KEY, FACTS, config_dir=write(tmp_path, entry()))
    assert tuned.config == CONFIG.replaced(num_warps=8, smooth_k=False)
    assert "over argument: " in tuned.detail


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_warps=8", "SAGE_PLUGIN_LAUNCH: not valid JSON"),
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
        launch_space.find_launch(of, FACTS)
    assert isinstance(error.value, UsageError)
    with pytest.raises(ConfigError):  # an error is not remembered as an answer
        launch_space.find_launch(of, FACTS)


def test_a_key_is_hashable_and_equal_by_value():
    assert CallKey.from_json(KEY.to_json()) == KEY
    assert hash(CallKey.from_json(KEY.to_json())) == hash(KEY)
