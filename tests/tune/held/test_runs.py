"""Times of configs come from a run's races, and from its screens by their ratios."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from sage_plugin.errors import ConfigError
from sage_plugin.registry import load
from sage_plugin.schema import LaunchConfig, Trial
from sage_plugin.tune.held.runs import times_of
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run.ledger import Ledger
from tests.cli.program import sage
from tests.registry import samples
from tests.registry.samples import FACTS, merged
from tests.registry.test_regions import TIMES, A, B, C, held


def ledger(
    folder: Path, seq: int, row: dict[LaunchConfig, float], *, finals=(), drift=1.0, facts=FACTS
) -> Path:
    """A run of one study; each screen came at another clock, its ratio at one."""
    folder.mkdir(parents=True)
    key = samples.key(seq_q=seq, seq_k=seq)
    metadata = {"device": facts.to_json(), "studies": [{"id": f"s{seq}", "key": key.to_json()}]}
    (folder / run_folder.METADATA).write_text(json.dumps(metadata))
    (folder / run_folder.RESULTS).write_text("{}")
    book = Ledger(folder / run_folder.LEDGER)
    base = next(iter(row.values()))
    for number, (config, ms) in enumerate(row.items()):
        time = samples.timing(ms * drift**number)
        extra = {"ratio": ms / base}
        book.append(Trial(f"s{seq}", config, "screen", "ok", time=time, extra=extra))
    book.append(Trial(f"s{seq}", samples.config(num_warps=8), "screen", "gate_failed", "no"))
    for config, ms in finals:
        book.append(Trial(f"s{seq}", config, "final", "ok", time=samples.timing(ms)))
    return folder


def test_ratios_stand_over_times_and_races_over_ratios(tmp_path):
    run = ledger(tmp_path / "r", 1024, TIMES[1024], drift=1.5, finals=[(A, 2.0), (B, 1.9)])
    facts, found = times_of([run])
    assert facts == FACTS
    (times,) = found.values()
    assert times == pytest.approx({A: 1.0, B: 0.95, C: 1.5})


def test_runs_of_two_cards_or_of_none_are_refused(tmp_path):
    other = dataclasses.replace(FACTS, slug="nvidia-h200")
    runs = [ledger(tmp_path / "a", 1, {A: 1.0}), ledger(tmp_path / "b", 2, {A: 1.0}, facts=other)]
    with pytest.raises(ConfigError, match=r"one card are needed, got nvidia-h100.*, nvidia-h200"):
        times_of(runs)
    (tmp_path / "a" / run_folder.METADATA).write_text('{"device": 5}')
    with pytest.raises(ConfigError, match="DeviceFacts"):
        times_of(runs[:1])
    with pytest.raises(ConfigError, match="no such file"):
        times_of([tmp_path / "absent"])


def test_the_command_writes_regions_and_drops_what_they_cover(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seq, row in TIMES.items():
        ledger(Path("tuning_runs") / f"r{seq}", seq, row)
    path = load.file_path("c", FACTS.slug)
    merged(path, held(1024, A), held(2048, B), held(4096, C))
    runs = [f"r{seq}" for seq in TIMES]
    done = sage("configs", "regions", *runs, "--config-dir", "c", "--max-loss", "0.02", "--fewest")
    assert done.exit_code == 0, done.stderr
    assert "dropped: fav3_sage:portable 16 heads of 64, 2,048 tokens, bf16 bhsd" in done.stdout
    assert (
        "16 heads of 64, 4,096 tokens, bf16 bhsd: 2048 to 16384, at most 0.8% lost" in done.stdout
    )
    assert [entry.key.seq_q for entry in load.read(path).entries] == [1024, 4096]
