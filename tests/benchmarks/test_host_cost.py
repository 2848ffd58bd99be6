"""`benchmarks/host_cost.py`: how a call is split, and what it says where there is no GPU."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from sage_plugin.kernels import launch_graph
from sage_plugin.measure.inputs import self_attention

SHAPE = self_attention(1, 2, 32, 32)


@pytest.fixture
def host_cost() -> ModuleType:
    return importlib.import_module("host_cost")


def _args(**changes: object) -> argparse.Namespace:
    known = {
        "device": "cpu", "kernels": ["fav2", "sage:emulation"], "head_dims": [32], "heads": 2,
        "length": 32, "calls": 6, "groups": 3,
    }  # fmt: skip
    return argparse.Namespace(**(known | changes))


class Clock:
    """A clock that goes only when it is told to."""

    def __init__(self) -> None:
        self.now_ns = 0

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def sleep_ms(self, ms: float) -> None:
        self.now_ns += round(ms * 1e6)


@pytest.fixture
def clock(host_cost: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(host_cost, "time", made)
    return made


def test_a_call_is_split_into_its_launches_and_the_rest(
    host_cost: ModuleType, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two launches, of 2 ms and, replayed, of 4 ms, and 3 ms beside them."""

    class Function:
        def __init__(self, name: str, ms: float) -> None:
            self.__name__ = self.name = name
            self.ms = ms

    def run(function: Function, *args: object, **options: object) -> None:
        clock.sleep_ms(function.ms)

    def call() -> None:
        launch_graph.launch(Function("first", 2), 1)
        launch_graph.relaunch(Function("second", 4), 0, [])
        clock.sleep_ms(3)

    monkeypatch.setattr(launch_graph, "launch", run)
    monkeypatch.setattr(launch_graph, "relaunch", run)
    waits: list[int] = []
    total = host_cost.host_us({"sdpa": lambda: clock.sleep_ms(1), "ours": call}, 6, 3, lambda: None)
    launches = host_cost.launches_us(call, 6, 3, lambda: waits.append(1))
    assert (launch_graph.launch, launch_graph.relaunch) == (run, run)
    assert launches == [{"kernel": "first", "us": 2000}, {"kernel": "second", "us": 4000}]
    assert len(waits) == 3
    parts = host_cost.split(total["ours"], launches, total)
    assert parts["launches_us"] == 6000
    assert parts["outside_us"] == 3000
    assert parts["above_sdpa_us"] == 2000


def test_the_device_is_waited_for_after_each_group(
    host_cost: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(host_cost, "WARMUP", 1)
    calls = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    host_cost.host_us(calls, 4, 2, lambda: order.append("wait"))
    warm = ["a", "wait", "b", "wait"]
    assert order == warm + 2 * ["a", "a", "wait", "b", "b", "wait"]


def test_the_file_holds_every_variant_of_every_head_dim(
    host_cost: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("triton")
    path = tmp_path / "h.json"
    monkeypatch.setattr(host_cost, "parsed", lambda argv: _args(output=path, commit="abc"))
    assert host_cost.main([]) == 0
    body = json.loads(path.read_text())
    assert (body["commit"], body["calls"], body["groups"]) == ("abc", 6, 3)
    sdpa, fav2, sage = body["rows"]
    assert [row["variant"] for row in body["rows"]] == ["sdpa", "fav2", "sage:emulation"]
    assert (fav2["ran"], sage["ran"]) == ("fav2:emulation", "sage:emulation")
    assert sdpa["shape"]["seq_q"] == 32
    for row in (fav2, sage):
        assert row["launches"] == []
        assert row["outside_us"] == row["total_us"] > 0
        assert row["above_sdpa_us"] == pytest.approx(row["total_us"] - sdpa["total_us"])
    assert "above SDPA) + no launch" in capsys.readouterr().out
