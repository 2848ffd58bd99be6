"""`sage configs apply`, `merge`, `diff`, `export`, `import`, `revalidate` from the outside."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from sage_plugin import device
from sage_plugin.registry import load
from sage_plugin.tune.configs import subprocess_runner
from tests.cli.program import error_of, sage
from tests.cli.test_configs import CPU, entry, put
from tests.registry import samples
from tests.tune.scripted import ScriptedRunner

TUNE = "tune --seq-len 256 -hq 1 -d 64 --kernel sage --device cpu --space s.json --run-name mine"
MINE = Path("c") / CPU.slug / "attention.json"


@pytest.fixture(autouse=True)
def _unshipped(monkeypatch):
    monkeypatch.setattr(load, "shipped_dir", lambda: None)
    Path("s.json").write_text('{"block_n": [64, 128]}')


@pytest.fixture
def script(monkeypatch):
    """Let configs of 64 keys be the faster ones by a factor, without a child process."""

    def use(factor: float = 0.5) -> None:
        runner = ScriptedRunner(lambda config: factor if config.block_n == 64 else 1.0)
        monkeypatch.setattr(subprocess_runner, "SubprocessRunner", lambda **_: runner)

    use()
    return use


def test_a_run_is_measured_alone_and_applied_later(script):
    measured = sage(f"{TUNE} --no-update")
    assert measured.exit_code == 0, measured.stderr
    assert "Next: sage configs apply mine" in measured.stdout
    assert "Configs: " not in measured.stdout
    assert not Path("user").exists()
    applied = sage("configs apply mine --config-dir c")
    assert applied.exit_code == 0, applied.stderr
    assert f"{MINE}: 1 added, 0 replaced, 0 kept" in applied.stdout
    assert "added: sage:emulation 1 head of 64, 256 tokens, bf16 bhsd: new" in applied.stdout
    (written,) = load.read(MINE).entries
    assert written.config.block_n == 64
    again = sage("configs apply tuning_runs/mine/results.json --config-dir c")
    assert "0 added, 0 replaced, 1 kept" in again.stdout
    assert "Nothing changed" in again.stdout
    assert sage(f"{TUNE} --update-registry --config-dir c2").exit_code == 0
    assert load.read(Path("c2") / CPU.slug / "attention.json").entries[0].config == written.config


def test_files_of_several_cards_are_merged_by_the_rules():
    put(entry(seq_q=64), entry())
    put(samples.entry(), root="c", facts=samples.FACTS)
    put(entry(seq_q=128), root="d")
    done = sage("configs merge c d into")
    assert done.exit_code == 0, done.stderr
    assert len(load.read(load.file_path("into", CPU.slug)).entries) == 3
    assert load.read(load.file_path("into", samples.FACTS.slug)).entries == (samples.entry(),)
    again = sage("configs merge c into").stdout
    assert "0 added, 0 replaced, 2 kept\n" in again
    assert "Nothing changed" in again
    assert "already there" not in again
    assert "give a folder of configs as the last word" in error_of(sage("configs merge c")).lower()
    assert "is a file" in error_of(sage(f"configs merge c {MINE}"))
    assert sage("configs merge absent into").exit_code == 2


def test_commands_to_run_next_are_quoted():
    put(samples.entry(samples.key(kernel="sage", variant="emulation")), root="my configs")
    for line, quoted in (
        ("configs merge 'my configs' 'all of them'", "sage configs check 'all of them'"),
        ("configs diff 'my configs' 'no configs'", "sage configs merge 'my configs' 'no configs'"),
        ("configs export 'my configs' --out 'my files'", "sage configs import 'my files/best"),
    ):
        Path("no configs").mkdir(exist_ok=True)
        put(root="no configs")
        done = sage(line)
        assert f"Next: {quoted}" in done.stdout, done.output


def test_what_a_card_measured_is_written_for_a_sibling_and_marked():
    h100 = samples.FACTS
    h200 = dataclasses.replace(h100, slug="nvidia-h200", name="NVIDIA H200", memory_bytes=2**37)
    put(samples.entry(), facts=h200)
    put(samples.entry(samples.key(seq_q=9)), root="into", facts=h100)
    assert sage("configs merge c into --as nvidia-h100").exit_code == 0
    entries = load.read(load.file_path("into", h100.slug)).entries
    marks = {entry.key.seq_q: entry.evidence.measured_on for entry in entries}
    assert marks == {9: "", samples.KEY.seq_q: "NVIDIA H200"}
    put(samples.entry(samples.key(seq_q=9), samples.config(block_m=64)), root="b", facts=h200)
    kept = sage("configs merge b into --as nvidia-h100")
    assert "this card measured its own" in kept.stdout + kept.stderr
    (own,) = (e for e in load.read(load.file_path("into", h100.slug)).entries if e.key.seq_q == 9)
    assert own.config == samples.entry().config
    put(samples.entry(), root="d", facts=dataclasses.replace(h200, sm_count=78))
    refused = sage("configs merge d into --as nvidia-h100")
    assert "are no siblings: sm_count is 78 and 132; tune on the card" in error_of(refused)
    assert "--as 'a100'" in error_of(sage("configs merge c into --as a100"))


def test_the_difference_of_two_folders_is_a_table():
    put(entry(seq_q=64), entry())
    put(entry(), samples.entry(samples.key(variant="emulation", seq_q=9)), root="d")
    shown = sage("configs diff c d")
    assert shown.exit_code == 0
    assert "1 call in A alone, 1 in B alone, 0 with another config, 0 with" in shown.stdout
    other = samples.entry(entry().key, samples.config(block_m=64, smooth_v=True))
    put(other, root="e")
    text = sage("configs diff d e").stdout
    assert "128x256 w4 s1" in text
    assert "64x64 w4 s3" in text
    assert "smooth_v" in text
    assert "Next:" not in sage("configs diff c c").stdout


def test_configs_leave_and_come_back_as_files_of_another_tuner(script):
    of_sage = samples.config(block_m=64, block_n=64, num_stages=1)
    key = samples.key(kernel="sage", variant="emulation", seq_q=256, seq_k=256, batch_heads=1)
    put(samples.entry(key, of_sage), entry())
    out = sage("configs export --format seed --config-dir c --out seeds --device cpu")
    assert out.exit_code == 0, out.stderr
    assert "left out: 1 entry," in out.stderr
    (path,) = Path("seeds").iterdir()
    assert path.name.startswith("best_configs_B1_H1_S256_D64_")
    assert json.loads(path.read_text())["256"]["config"]["BLOCK_SIZE_N"] == 64
    taken = sage(f"configs import {path} --config-dir d --device cpu --dtype bf16")
    assert taken.exit_code == 0, taken.stderr
    (came,) = load.read(Path("d") / CPU.slug / "attention.json").entries
    assert (came.key, came.config.block_n, came.config.block_m) == (key, 64, 64)
    script(2.0)
    lost = sage(f"configs import {path} --config-dir e --device cpu")
    assert "default kept" in lost.stdout
    assert "as_seed" in error_of(sage("configs export --format as_seed"))
    assert sage("configs export --config-dir nowhere --device cpu").exit_code == 2


def test_configs_in_use_are_measured_again(script):
    key = samples.key(kernel="sage", variant="emulation", seq_q=256, seq_k=256, batch_heads=1)
    of_64 = samples.config(block_n=64, num_stages=1)
    put(samples.entry(key, of_64, because=samples.evidence(synthetic=True)))
    planned = sage("configs revalidate --config-dir c --device cpu --dry-run")
    assert planned.exit_code == 0, planned.stderr
    assert "1x1 heads of 64" in planned.stdout
    script(3.0)
    done = sage("configs revalidate --config-dir c --device cpu")
    assert done.exit_code == 0, done.stderr
    (now,) = load.read(MINE).entries
    assert now.evidence.confirmed
    assert now.evidence.toolchain == device.toolchain()
    nothing = sage("configs revalidate --stale --config-dir c --device cpu")
    assert "No stale configs are in use" in nothing.stdout
    put(samples.entry(key, of_64))
    assert "none of such a call were given" in error_of(
        sage("configs revalidate --config-dir c --device cpu")
    )


def test_a_space_of_the_package_is_known_by_its_name(script, monkeypatch):
    monkeypatch.undo()
    for name in ("tuning_space_attn_qk_int8.json", "tuning_space_attn_qk_int8_test.json"):
        shown = sage(f"tune --seq-len 64 --kernel sage --device cpu --config-file {name} --dry-run")
        assert shown.exit_code == 0, shown.stderr
    assert sage("tune --seq-len 64 --config-file spaces/absent.json --dry-run").exit_code == 2


def put_linears() -> None:
    """Write an entry of attention and one of a grouped linear, both of drawn inputs."""
    drawn = samples.evidence(synthetic=True)
    grouped = dataclasses.replace(samples.LINEAR_KEY, kernel="bf16", groups=8)
    of_groups = dataclasses.replace(samples.linear_entry(grouped), evidence=drawn)
    put(samples.entry(samples.key(kernel="sage"), because=drawn), facts=samples.FACTS)
    put(of_groups, facts=samples.FACTS)


def test_every_family_is_measured_again_and_exported(on_gpu, monkeypatch):
    put_linears()
    runner = ScriptedRunner()
    monkeypatch.setattr(subprocess_runner, "SubprocessRunner", lambda **_: runner)
    done = sage("configs revalidate --config-dir c")
    assert done.exit_code == 0, done.stderr
    for family in ("attention", "grouped_linear"):
        path = load.file_path("c", samples.FACTS.slug, family)
        assert f"Configs: {path}" in done.stdout
        (entry,) = load.read(path).entries
        now = device.toolchain(family)
        assert (entry.evidence.toolchain, entry.evidence.confirmed) == (now, True)
    made = sage(f"configs export --format gmm --config-dir c --as {samples.FACTS.slug} --out tiles")
    assert made.exit_code == 0, made.stderr
    assert [path.name for path in Path("tiles").iterdir()] == ["m1024_k512_n1024_g8.json"]


def test_what_only_recordings_can_replace_does_not_hold_up_the_others(on_gpu, script):
    put_linears()
    put(samples.entry(), facts=samples.FACTS)
    done = sage("configs revalidate --config-dir c --dry-run")
    assert done.exit_code == 0, done.stderr
    assert "none of such a call were given" in " ".join(done.stderr.split())
    assert "1024" in done.stdout.replace(",", "")
