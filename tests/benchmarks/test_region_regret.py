"""`benchmarks/region_regret.py`: its arithmetic, on times that are made up and on ledgers."""

from __future__ import annotations

import argparse
import importlib
import json
import math
from types import ModuleType

import pytest

from sage_plugin import device
from tests.registry import samples
from tests.registry.samples import FACTS
from tests.registry.test_regions import TIMES
from tests.tune.held.test_prices import ledger


@pytest.fixture
def regret() -> ModuleType:
    return importlib.import_module("region_regret")


def keys(times=TIMES):
    return {seq: samples.key(seq_q=seq, seq_k=seq) for seq in times}


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


def test_runs_are_shown_as_tables(regret, tmp_path, capsys):
    runs = [
        ledger(tmp_path / f"{seq}", seq, row, drift=1.5)
        for seq, row in TIMES.items()
        if seq != 16_384
    ]
    (row,) = regret.of_ledgers(runs)
    assert row["prices"]["1024"] == pytest.approx({"1024": 0, "2048": 0.05, "4096": 0.25})
    assert row["worst_regret"] == pytest.approx(0.05)
    assert row["unserved"] == 0
    out = tmp_path / "regret.json"
    assert regret.main(["--output", str(out), "--ledgers", *map(str, runs)]) == 0
    assert json.loads(out.read_text())["rows"][0]["fewest"]
    shown = capsys.readouterr().out
    assert "1024      0.00      5.00     25.00" in shown
    assert "left out      0.50      5.00      1.00" in shown
    alone = regret.main(["--output", str(out), "--ledgers", str(runs[0])])
    assert alone == 1, "one length has no other"


def test_a_pool_is_the_default_and_configs_from_all_over(regret):
    space = regret.candidates(samples.KEY, FACTS)
    chosen = regret.pool(samples.KEY, FACTS, 4)
    assert chosen[0] == space[0]
    assert len(set(chosen)) == 4
    assert len(regret.pool(samples.KEY, FACTS, 10_000)) == len(space)


def test_lengths_are_timed_until_the_budget_ends(regret, monkeypatch):
    signature = (1, 2, 1, 32, True, (32, 64, 96))
    monkeypatch.setattr(regret, "SIGNATURES", {"tiny": signature})
    monkeypatch.setattr(regret, "ROUNDS", 2)
    args = argparse.Namespace(kernel="sage:emulation", device="cpu", configs=2)
    facts = device.facts("cpu")
    row = regret.timed("tiny", facts, args, math.inf)
    assert list(row["prices"]) == ["32", "64", "96"]
    assert row["kernel"] == "sage:emulation"
    assert all(len(timed) == 2 for timed in row["ms"].values())
    assert regret.timed("tiny", facts, args, -math.inf) is None


def test_it_needs_a_gpu_or_ledgers(regret, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        regret.main(["--output", str(tmp_path / "x.json")])
    assert "there is no GPU" in capsys.readouterr().err
