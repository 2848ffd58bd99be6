"""`sage configs` from the outside."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest

from sage_plugin import device, files
from sage_plugin.kernels.attention import dispatch
from sage_plugin.registry import load, store
from sage_plugin.schema import ATTENTION
from tests.cli import program
from tests.registry import samples

CPU = device.facts("cpu")
CALL = ("-sq", "1024", "-hq", "16", "-d", "64", "--kernel", "fav3_sage")


@pytest.fixture(autouse=True)
def _unshipped(monkeypatch):
    monkeypatch.setattr(load, "shipped_dir", lambda: None)


def sage(*words):
    return program.sage("configs", *words)


def entry(**changes):
    config = samples.config(block_n=256, num_stages=1)
    return samples.entry(samples.key(variant="emulation", **changes), config)


def put(*entries, root: str = "c", facts=CPU) -> Path:
    family = entries[0].key.family if entries else ATTENTION
    path = load.file_path(root, facts.slug, family)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(path, store.text_of(samples.file(*entries, facts=facts)))
    return path


def test_list_says_where_it_looked_when_there_is_nothing():
    result = sage("list")
    assert result.exit_code == 0
    assert "No tuned configs" in result.stdout
    assert f"user: {Path('user').resolve()}/sage_plugin/{CPU.slug}/attention.json" in result.stdout
    assert "Next: sage tune captured_inputs" in result.stdout


def test_list_shows_the_entries_of_this_device_and_all_of_every():
    put(entry())
    put(samples.entry(samples.key(kernel="sage")), facts=samples.FACTS)
    mine = sage("list", "--config-dir", "c")
    assert mine.exit_code == 0
    assert "fav3_sage:emulation" in mine.stdout
    assert "128x256 w4 s1" in mine.stdout
    assert "captures 2026-11-20" in mine.stdout
    assert "sage:portable" not in mine.stdout
    every = sage("list", "--all", "--config-dir", "c")
    assert "fav3_sage:emulation" in every.stdout
    assert "sage:portable" in every.stdout
    assert "H100" in every.stdout


def test_masks_are_shown_explained_and_part_of_the_next_command():
    put(entry(mask_kind="key_bias"))
    assert "bf16 bhsd key_bias" in sage("list", "--config-dir", "c").stdout
    masked = sage("explain", *CALL, "--mask", "key_bias", "--config-dir", "c")
    assert masked.exit_code == 0, masked.stderr
    assert "(exact:" in masked.stdout
    other = sage("explain", *CALL, "--mask", "dense", "--config-dir", "c")
    assert "(default:" in other.stdout
    assert "--mask dense" in other.stdout
    assert "--mask" not in sage("explain", *CALL).stdout


def test_list_names_a_damaged_file():
    put(entry()).write_text("{")
    result = sage("list", "--config-dir", "c")
    assert result.exit_code == 0
    assert "not valid JSON" in result.stdout


def test_explain_an_exact_match():
    path = put(entry())
    result = sage("explain", *CALL, "--config-dir", "c")
    assert result.exit_code == 0, result.stderr
    assert f"argument: {path}: exact match" in result.stdout
    assert "It gets 128x256 w4 s1 no smooth_v (exact: argument" in result.stdout
    assert "legal on this device" in result.stdout


def test_explain_a_near_match_and_the_command_that_would_fill_it():
    put(dataclasses.replace(entry(), seq_q_range=(512, 2048), seq_k_range=(512, 2048)))
    result = sage(
        "explain", "-sq", "1500", "-hq", "16", "-d", "64", "--kernel", "fav3_sage",
        "--config-dir", "c",
    )  # fmt: skip
    assert "near match, measured at seq_q 1024" in result.stdout
    assert "Next: sage tune --kernel fav3_sage:emulation" in result.stdout


def test_explain_a_miss_names_the_first_differing_field():
    put(entry())
    result = sage("explain", *CALL, "--causal", "--config-dir", "c")
    assert result.exit_code == 0
    assert "in the closest entry causal is False there, True here" in result.stdout
    assert "(default: default of" in result.stdout
    assert "Next: sage tune --kernel fav3_sage:emulation" in result.stdout
    assert "--causal" in result.stdout.rpartition("Next:")[2]
    long = sage("explain", "-sq", "9000", *CALL[2:], "--config-dir", "c")
    assert "seq_q 9000 is over 2 times from its measured range 1024..1024" in long.stdout


def test_the_command_of_a_miss_tunes_exactly_that_call():
    words = ["-sq", "96", "-sk", "64", "-hq", "4", "-hk", "2", "-d", "32", "--layout", "bshd"]
    words += ["--dtype", "fp16", "--causal", "--kernel", "sage", "--config-dir", "my configs"]
    Path("my configs").mkdir()
    missed = sage("explain", *words)
    name, *command = shlex.split(missed.stdout.rpartition("Next: ")[2])
    assert name == "sage"
    done = program.sage(*command, "--max-trials", "1")
    assert done.exit_code == 0, done.stderr
    dispatch.forget()
    assert "exact match" in sage("explain", *words).stdout


def test_explain_an_illegal_entry():
    illegal = dataclasses.replace(entry(), config=samples.config(block_m=100))
    put(illegal)
    result = sage("explain", *CALL, "--config-dir", "c")
    assert "none legal for this call" in result.stdout
    assert "(default: default of" in result.stdout


def test_explain_a_damaged_file(caplog):
    put(entry()).write_text("[]")
    result = sage("explain", *CALL, "--config-dir", "c")
    assert result.exit_code == 0
    assert "passed over" in result.stdout


def test_explain_an_override_by_the_environment(monkeypatch):
    monkeypatch.setenv("SAGE_PLUGIN_LAUNCH", '{"block_n": 64}')
    result = sage("explain", *CALL)
    assert "(env: SAGE_PLUGIN_LAUNCH" in result.stdout


def test_explain_a_call_of_the_hosts_attention():
    result = sage("explain", "-sq", "64", "-hq", "2", "-d", "64")
    assert result.exit_code == 0
    assert "goes to the host's attention" in result.stdout
    wide = sage("explain", "-sq", "64", "-hq", "2", "-d", "512", "--kernel", "sage")
    assert "head dim 512" in wide.stdout
    assert "has no launch config" in sage("explain", *CALL[:-1], "sdpa").stdout


def test_check_sound_files():
    path = put(entry())
    for words in (("c",), (path,), ("--config-dir", "c")):
        result = sage("check", *words)
        assert result.exit_code == 0, result.stdout
        assert f"Sound: {path}" in result.stdout
    assert "no file is in use" in sage("check").stdout


def test_check_names_every_problem_and_exits_2():
    put(entry(kernel="fav9"), dataclasses.replace(entry(), config=samples.config(block_m=100)))
    put(entry(), root="c2").write_text('{"schema_version": NaN}')
    result = sage("check", "c")
    assert result.exit_code == 2
    assert "unknown kernel 'fav9'" in result.stdout
    assert "config is illegal: block_m 100" in result.stdout
    assert "2 problems in 1 file." in result.stdout
    damaged = sage("check", "c2")
    assert damaged.exit_code == 2
    assert "NaN" in damaged.stdout


@pytest.mark.parametrize(
    ("rule", "next_step"),
    [
        ('"kernel": "sage", "steps": ":20%"', "patch(pipe, policy="),
        ('"kernel": "bf16", "op": "grouped_linear"', "patch(pipe, policy="),
        ('"kernel": "qk_int8", "op": "paged_attention"', "continuous_batching(model, policy="),
    ],
)
def test_check_takes_policies_too(tmp_path, rule, next_step):
    path = tmp_path / "policy.json"
    path.write_text(f'{{"schema_version": 1, "rules": [{{{rule}}}]}}')
    result = sage("check", path)
    assert result.exit_code == 0, result.stdout
    assert f"Sound: {path}" in result.stdout.replace("\n", "")
    assert next_step in result.stdout.replace("\n", " ")
    path.write_text('{"schema_version": 1, "rules": [{"kernel": "sage"}, {"kernel": "auto"}]}')
    result = sage("check", path)
    assert result.exit_code == 2
    assert "rule 2 never fits a call, since rule 1 takes all" in result.stdout.replace("\n", " ")


def put_tuned_with(**versions) -> Path:
    """Write two entries of the H100, one of them measured with other software."""
    here = device.toolchain()
    now = samples.evidence(toolchain=here)
    then = samples.evidence(toolchain=dataclasses.replace(here, **versions))
    put(
        samples.entry(because=then),
        samples.entry(samples.key(seq_q=9000), because=now),
        facts=samples.FACTS,
    )
    return load.file_path("c", samples.FACTS.slug)


@pytest.fixture
def _triton(monkeypatch):
    """As on a machine with Triton, whatever is here."""
    monkeypatch.setattr(device, "triton_version", lambda: "3.6.0")
    device.toolchain.cache_clear()
    yield
    device.toolchain.cache_clear()


@pytest.mark.usefixtures("_triton")
@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({"triton": "2.0.1"}, "1 of 2 entries are stale: triton 2.0 then, "),
        ({"torch": "1.13"}, "1 of 2 entries are stale: torch 1.13 then, "),
        ({"kernels": "0" * 16}, "1 of 2 entries are stale: the kernels were edited since (1)"),
        ({"kernels": "", "driver": "1", "python": "2.7"}, ""),
    ],
)
def test_entries_of_other_software_are_told_and_strictly_refused(versions, says):
    path = put_tuned_with(**versions)
    result = sage("check", path)
    assert result.exit_code == 0, result.stdout
    assert says in result.stdout
    assert ("revalidate" in result.stdout) == bool(says)
    assert sage("check", path, "--strict").exit_code == bool(says)
    shown = sage("list", "--as", samples.FACTS.slug, "--config-dir", "c").stdout
    assert shown.count(", stale") == bool(says)


AS_H100 = ("--as", samples.FACTS.slug, "--config-dir", "c")


@pytest.mark.usefixtures("_triton")
def test_a_card_that_is_not_here_is_answered_for_from_its_file():
    put_tuned_with(triton="2.0")
    listed = sage("list", *AS_H100)
    assert "NVIDIA H100 80GB HBM3, 2 entries" in listed.stdout
    call = ("-sq", "1024", "-hq", "16", "-d", "64", "--kernel", "fav3_sage:portable")
    explained = sage("explain", *call, *AS_H100).stdout
    assert "fav3_sage:portable on NVIDIA H100 80GB HBM3" in explained
    assert "(exact, stale: argument: " in explained
    assert "stale: triton 2.0 then, " in explained
    assert "Next: sage configs revalidate" in explained
    wrong = sage("list", "--as", "nvidia-h100-80gb-hbm", "--config-dir", "c")
    assert wrong.exit_code == 2
    assert "did you mean 'nvidia-h100-80gb-hbm3'? Cards with configs are" in wrong.stderr
    assert sage("list", *AS_H100, "--device", "cpu").exit_code == 2


def test_check_finds_entries_that_no_device_can_reach():
    facts = dataclasses.replace(samples.FACTS, slug="h100")
    put(samples.entry(), facts=facts)
    result = sage("check", "c")
    assert result.exit_code == 2
    assert "1 entry unreachable" in result.stdout
