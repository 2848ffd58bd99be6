"""Writers add by rule, one at a time, and never leave half a file."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from sage_plugin.errors import ConfigError, OutputError
from sage_plugin.registry import load, lookup, store
from sage_plugin.registry.merge import MergeReport
from sage_plugin.schema import RegistryEntry
from tests.registry import samples
from tests.registry.samples import FACTS

SPAWN = multiprocessing.get_context("spawn")


def put_in(path: Path, *entries: RegistryEntry) -> MergeReport:
    return samples.merged(path, *entries, min_gain=0.01)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FACTS.slug / "attention.json"


def test_a_new_file_is_found_by_the_next_look_up(path, tmp_path):
    assert lookup.find(samples.KEY, facts=FACTS, config_dir=tmp_path) is None
    report = put_in(path, samples.entry())
    assert report.added == ((samples.KEY, "new"),)
    assert lookup.find(samples.KEY, facts=FACTS, config_dir=tmp_path).entry == samples.entry()


def test_a_small_gain_is_kept_out(path):
    for gain_low in (-0.2, 0.0, 0.01):
        report = put_in(path, samples.entry(because=samples.evidence(gain_low)))
        assert [key for key, _ in report.kept] == [samples.KEY]
    assert "1.00%" in report.kept[0][1]
    assert not path.exists()


def test_a_confirmed_baseline_is_written_and_demotes_an_old_winner(path):
    put_in(path, samples.entry())
    baseline = samples.entry(
        launch=samples.config(block_m=64), because=samples.evidence(0.0, confirmed=True)
    )
    assert put_in(path, baseline).replaced == ((samples.KEY, "another config won"),)
    (held,) = load.read(path).entries
    assert held == baseline


def test_synthetic_evidence_never_replaces_captures(path):
    put_in(path, samples.entry())
    before = path.read_bytes()
    synthetic = samples.entry(
        launch=samples.config(block_m=64), because=samples.evidence(0.5, synthetic=True)
    )
    report = put_in(path, synthetic)
    assert "synthetic" in report.kept[0][1]
    confirmed = samples.evidence(0.0, synthetic=True, confirmed=True)
    assert put_in(path, samples.entry(because=confirmed)).kept
    assert path.read_bytes() == before


@pytest.mark.parametrize("stamp", ["noisy", "throttled"])
@pytest.mark.parametrize("confirmed", [False, True])
def test_times_that_cannot_be_trusted_replace_nothing_that_is_held(path, stamp, confirmed):
    shaky = samples.evidence(0.0 if confirmed else 0.5, confirmed=confirmed, stamp=stamp)
    other = samples.entry(launch=samples.config(block_m=64), because=shaky)
    assert put_in(path, other).added, "better than nothing"
    put_in(path, samples.entry(because=samples.evidence(stamp="clean")))
    report = put_in(path, other)
    assert report.kept == (
        (samples.KEY, f"its times are {stamp}, which replaces nothing that is held"),
    )
    emulated = samples.key(variant="emulation")
    put_in(path, samples.entry(emulated))
    assert put_in(path, samples.entry(emulated, because=shaky)).replaced


def test_captures_replace_synthetic_evidence_and_synthetic_replaces_synthetic(path):
    synthetic = samples.evidence(0.5, synthetic=True)
    put_in(path, samples.entry(because=synthetic))
    other = samples.entry(launch=samples.config(block_m=64), because=synthetic)
    assert put_in(path, other).replaced
    assert put_in(path, samples.entry()).replaced


def test_merging_again_changes_nothing(path):
    put_in(path, samples.entry())
    stamp = path.stat().st_mtime_ns
    assert put_in(path, samples.entry()).kept == ((samples.KEY, "already there"),)
    assert path.stat().st_mtime_ns == stamp
    renewed = samples.entry(because=samples.evidence(date="2026-12-01"))
    assert put_in(path, renewed).replaced == ((samples.KEY, "evidence renewed"),)


@pytest.mark.parametrize("content", ["{", '{"schema_version": 9}', ""])
def test_a_damaged_file_is_an_error_and_stays(path, content):
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"attention\.json"):
        put_in(path, samples.entry())
    assert path.read_text() == content


def test_another_devices_file_is_an_error_and_stays(path):
    put_in(path, samples.entry())
    path.write_text(path.read_text().replace(FACTS.slug, "other-chip"))
    before = path.read_text()
    with pytest.raises(ConfigError, match="other-chip"):
        put_in(path, samples.entry(samples.key(seq_q=7)))
    assert path.read_text() == before


def test_an_unsound_entry_is_refused(path):
    with pytest.raises(ConfigError, match="block_m is 0"):
        put_in(path, samples.entry(launch=samples.config(block_m=0)))


def test_a_place_that_cannot_be_written_is_an_output_error(tmp_path):
    (tmp_path / "taken").write_text("a file where a folder should be")
    with pytest.raises(OutputError, match="cannot be written"):
        put_in(tmp_path / "taken" / FACTS.slug / "attention.json", samples.entry())


def test_entries_reach_towards_measured_neighbors_and_twice_beyond(path, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "shipped_dir", lambda: None)

    def square(seq: int, **changes: object) -> RegistryEntry:
        return samples.entry(samples.key(seq_q=seq, seq_k=seq, **changes))

    put_in(path, square(1024))
    assert load.read(path).entries[0].seq_q_range == (1024, 1024)
    put_in(path, square(1536), square(16_384), square(4096, head_dim=128))
    ranges = {e.key.seq_q: e.seq_q_range for e in load.read(path).entries}
    assert ranges == {
        1024: (1024, 2048),
        1536: (1024, 3072),
        4096: (4096, 4096),
        16_384: (8192, 16_384),
    }

    def found(seq: int) -> int | None:
        key = samples.key(seq_q=seq, seq_k=seq)
        match = lookup.find(key, facts=FACTS, config_dir=tmp_path)
        return match and match.entry.key.seq_q

    asked = (511, 512, 1023, 1200, 1300, 3072, 3500, 9000, 16_385, 32_768, 32_769)
    assert [found(s) for s in asked] == [
        None, 1024, 1024, 1024, 1536, 1536, 1536, 16_384, 16_384, 16_384, None
    ]  # fmt: skip


def test_a_range_that_a_file_states_is_never_narrowed(path):
    put_in(path, samples.entry(seq_q_range=(64, 65_536)))
    put_in(path, samples.entry(samples.key(seq_q=2048)))
    ranges = {e.key.seq_q: e.seq_q_range for e in load.read(path).entries}
    assert ranges[1024] == (64, 65_536)


def _die_before_rename(path: Path) -> None:
    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    os.replace = kill
    put_in(path, samples.entry(samples.key(seq_q=4096)))


def test_killed_between_write_and_rename_the_old_file_stays(path):
    put_in(path, samples.entry())
    before = path.read_bytes()
    victim = SPAWN.Process(target=_die_before_rename, args=(path,))
    victim.start()
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    assert path.read_bytes() == before
    assert list(path.parent.glob(".*.tmp")), "the victim had written its file"
    put_in(path, samples.entry(samples.key(seq_q=2048)))
    assert len(load.read(path).entries) == 2
    assert not list(path.parent.glob(".*.tmp")), "the next writer cleans up"


def test_a_lock_file_left_behind_blocks_nobody(path):
    path.parent.mkdir()
    path.with_name("attention.json.lock").write_text("4242")
    assert put_in(path, samples.entry()).added


def test_a_held_lock_ends_in_a_sentence(path, monkeypatch):
    monkeypatch.setattr(store, "LOCK_TIMEOUT_S", 0.05)
    import filelock

    path.parent.mkdir()
    holder = filelock.FileLock(path.with_name("attention.json.lock"), is_singleton=False)
    with holder, pytest.raises(OutputError, match=r"attention\.json\.lock"):
        put_in(path, samples.entry())
