"""`benchmarks/region_regret.py`: its arithmetic, on times that are made up and on ledgers."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from sage_plugin.schema import LaunchConfig, Trial
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run.ledger import Ledger
from tests.registry import samples
from tests.registry.samples import FACTS

A, B, C = (samples.config(block_m=m) for m in (32, 64, 128))
TIMES = {
    1024: {A: 1.0, B: 1.005, C: 1.5},
    2048: {A: 2.1, B: 2.0, C: 2.015},
    4096: {A: 5.0, B: 4.04, C: 4.0},
    16_384: {A: 90.0, B: 66.0, C: 60.0},
}


@pytest.fixture
def regret() -> ModuleType:
    return importlib.import_module("region_regret")


def keys(times=TIMES):
    return {seq: samples.key(seq_q=seq, seq_k=seq) for seq in times}


def test_winners_are_priced_at_every_length(regret):
    assert regret.winners(TIMES) == {1024: A, 2048: B, 4096: C, 16_384: C}
    prices = regret.prices(TIMES)
    assert prices[1024] == pytest.approx({1024: 0, 2048: 0.05, 4096: 0.25, 16_384: 0.5})
    assert prices[2048] == pytest.approx({1024: 0.005, 2048: 0, 4096: 0.01, 16_384: 0.1})
    holes = {1024: {A: 1.0}, 2048: {B: 1.0}}
    assert regret.prices(holes) == {1024: {1024: 0, 2048: None}, 2048: {1024: None, 2048: 0}}


def test_a_length_that_is_left_out_gets_what_the_runtime_would_find(regret):
    found = regret.left_out(TIMES, keys(), FACTS)
    assert [(seq, row["from"], row["rule"]) for seq, row in found.items()] == [
        (1024, 2048, "reached"),
        (2048, 1024, "measured"),
        (4096, 2048, "measured"),
        (16_384, None, None),
    ]
    losses = [row["regret"] for row in found.values()]
    assert losses[:3] == pytest.approx([0.005, 0.05, 0.01])
    assert losses[3] is None, "over twice beyond the others"
    alone = {1024: TIMES[1024], 16_384: TIMES[16_384]}
    unserved = regret.left_out(alone, keys(alone), FACTS)
    assert [row["regret"] for row in unserved.values()] == [None, None]


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        (0.6, {1024: (1024, 16_384)}),
        (0.02, {1024: (1024, 1024), 4096: (2048, 16_384)}),
        (0.0, {1024: (1024, 1024), 2048: (2048, 2048), 4096: (4096, 16_384)}),
    ],
)
def test_the_fewest_entries_within_a_limit_and_their_regions(regret, limit, kept):
    assert regret.fewest(TIMES, limit) == kept


def test_a_region_ends_at_a_gap(regret):
    gap = {1: {A: 1.0, B: 2.0}, 2: {A: 2.0, B: 1.0}, 3: {A: 1.0, B: 2.0}}
    assert regret.fewest(gap) == {1: (1, 1), 2: (2, 2)}


def ledger(folder: Path, seq: int, row: dict[LaunchConfig, float], *, finals=(), drift=1.0) -> Path:
    """A run of one study; each screen came at another clock, its ratio at one."""
    folder.mkdir(parents=True)
    key = samples.key(seq_q=seq, seq_k=seq)
    metadata = {"device": FACTS.to_json(), "studies": [{"id": f"s{seq}", "key": key.to_json()}]}
    (folder / run_folder.METADATA).write_text(json.dumps(metadata))
    book = Ledger(folder / run_folder.LEDGER)
    base = next(iter(row.values()))
    for number, (config, ms) in enumerate(row.items()):
        time = samples.timing(ms * drift**number)
        book.append(Trial(f"s{seq}", config, "screen", "ok", time=time, extra={"ratio": ms / base}))
    book.append(Trial(f"s{seq}", samples.config(num_warps=8), "screen", "gate_failed", "no"))
    for config, ms in finals:
        book.append(Trial(f"s{seq}", config, "final", "ok", time=samples.timing(ms)))
    return folder


def test_runs_are_read_by_ratios_and_races(regret, tmp_path, capsys):
    runs = [
        ledger(tmp_path / f"{seq}", seq, row, drift=1.5)
        for seq, row in TIMES.items()
        if seq != 16_384
    ]
    (row,) = regret.of_ledgers(runs)
    assert row["prices"]["1024"] == pytest.approx({"1024": 0, "2048": 0.05, "4096": 0.25})
    assert row["worst_regret"] == pytest.approx(0.05)
    assert row["unserved"] == 0
    raced = ledger(tmp_path / "raced", 8192, {A: 1.0, B: 1.1}, finals=[(A, 2.0), (B, 1.9)])
    times = regret.trial_times(Ledger(raced / run_folder.LEDGER), "s8192")
    assert times == pytest.approx({A: 1.0, B: 0.95})
    out = tmp_path / "regret.json"
    assert regret.main(["--output", str(out), "--ledgers", *map(str, runs)]) == 0
    assert json.loads(out.read_text())["rows"][0]["fewest"]
    shown = capsys.readouterr().out
    assert "1024      0.00      5.00     25.00" in shown
    assert "left out      0.50      5.00      1.00" in shown
    assert regret.main(["--output", str(out), "--ledgers", str(raced)]) == 1, "one length alone"


def test_a_pool_is_the_default_and_configs_from_all_over(regret):
    space = regret.ATTENTION.candidates(samples.KEY, FACTS)
    chosen = regret.pool(samples.KEY, FACTS, 4)
    assert chosen[0] == space[0]
    assert len(set(chosen)) == 4
    assert len(regret.pool(samples.KEY, FACTS, 10_000)) == len(space)


def test_it_needs_a_gpu_or_ledgers(regret, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        regret.main(["--output", str(tmp_path / "x.json")])
    assert "there is no GPU" in capsys.readouterr().err
