"""`benchmarks/peers.py`: what a row holds, and how far its table can be trusted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sage_plugin.measure.clocks import ClockSnapshot
from sage_plugin.measure.inputs import self_attention
from sage_plugin.measure.timing import Samples

SHAPE = self_attention(1, 2, 128, 64)


def _args(**changes: object) -> argparse.Namespace:
    known = {
        "device": "cpu", "kernels": ["sage", "fav3_fp8"], "rows": 16, "budget": 0.1,
        "search": False,
    }  # fmt: skip
    return argparse.Namespace(**(known | changes))


def test_a_preset_holds_configs_errors_and_its_stamp(
    peers: ModuleType, peer_kernels: ModuleType, installed: ModuleType
) -> None:
    how, rows = peers.run_preset("tiny", SHAPE, peer_kernels.timed_peers(), _args())
    by_name = {row["variant"]: row for row in rows}
    assert set(by_name) == {
        "sage", "sage kernel alone", "fav3_fp8", "fav3_fp8 kernel alone", "sdpa flash", "fa3 bf16",
        "fa3 fp8 kernel alone", "sageattention 1.0.6", "sageattention 1.0.6 kernel alone",
    }  # fmt: skip
    for name in ("sage", "sage kernel alone"):
        assert by_name[name]["launch"]["block_n"] >= 32
        assert by_name[name]["ran"] == "sage:emulation"
    assert by_name["sage"]["ratio_to_emulation"] == pytest.approx(1.0, abs=0.01)
    assert by_name["sage"]["deterministic"]
    assert 0.005 < by_name["sage"]["centred_rel_l1"] < 0.03
    assert by_name["fa3 bf16"]["rel_l1"] < 0.005 < by_name["fa3 fp8 kernel alone"]["rel_l1"] < 0.1
    assert by_name["fa3 bf16"]["out_dtype"] == "bfloat16"
    assert how["aa"] == "sage"
    assert how["stamp"] in ("clean", "noisy")
    assert (how["stamp"] == "clean") == (abs(how["aa_ratio"] - 1) < 0.01)
    flops = 4 * 2 * 128 * 128 * 64
    assert by_name["sage"]["tflops"] == pytest.approx(flops / by_name["sage"]["ms"] / 1e9)
    json.dumps([how, rows], allow_nan=False)


def test_a_search_times_every_config_and_no_kernel_alone(
    peers: ModuleType, peer_kernels: ModuleType
) -> None:
    args = _args(kernels=["sage"], search=True)
    _, rows = peers.run_preset("tiny", SHAPE, peer_kernels.timed_peers(), args)
    ours = [row for row in rows if "launch" in row]
    assert len({row["launch"]["block_n"] for row in ours}) > 1
    assert all(json.loads(row["variant"].removeprefix("sage ")) == row["launch"] for row in ours)


def test_the_stamp_follows_the_a_a_ratio_and_the_clocks(peers: ModuleType) -> None:
    first = Samples("sage", (1.0, 1.0, 1.0), "events")
    again = Samples("sage again", (1.05, 1.05, 9.0), "events")
    found = peers.trust({"sage": first, "sage again": again}, "sage", None, None)
    assert (found["stamp"], found["aa_ratio"]) == ("noisy", 1.05)
    hot = ClockSnapshot(1400, 2600, 88, 690.0, 700.0, ("thermal (hardware)",))
    found = peers.trust({"sage": first, "sage again": first}, "sage", None, hot)
    assert found["stamp"] == "throttled"
    assert found["before"] is None
    assert found["after"]["power_w"] == 690.0
    assert peers.trust({"sage": first, "sage again": first}, "sage", None, None)["stamp"] == "clean"


def test_the_file_holds_tables_and_rows(
    peers: ModuleType,
    installed: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(peers, "presets", lambda: {"tiny": SHAPE})
    monkeypatch.setattr(
        peers,
        "parsed",
        lambda argv: _args(output=tmp_path / "p.json", presets=["tiny"], commit="abc"),
    )
    assert peers.main([]) == 0
    body = json.loads((tmp_path / "p.json").read_text())
    assert body["commit"] == "abc"
    assert body["peers"]["sageattention"] == "1.0.6"
    assert [table["preset"] for table in body["tables"]] == ["tiny"]
    assert body["tables"][0]["shape"]["seq_q"] == 128
    assert {row["preset"] for row in body["rows"]} == {"tiny"}
    said = capsys.readouterr().out
    assert "sdpa cudnn left out" in said
    assert "A/A" in said


def test_a_failing_kernel_leaves_the_others(
    peers: ModuleType,
    peer_kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = peers.judge_ours

    def failing(kernel: str, *args: object) -> object:
        if kernel == "sage":
            raise RuntimeError("out of registers")
        return whole(kernel, *args)

    monkeypatch.setattr(peers, "judge_ours", failing)
    _, rows = peers.run_preset("tiny", SHAPE, peer_kernels.timed_peers(), _args())
    names = [row["variant"] for row in rows]
    assert "fav3_fp8" in names
    assert "sage" not in names
    assert "sage failed: out of registers" in capsys.readouterr().out


def test_rows_are_judged_against_exact_attention(
    peers: ModuleType, accuracy: ModuleType, accuracy_inputs: ModuleType
) -> None:
    tensors = accuracy_inputs.drawn("biased", SHAPE, device="cpu")
    exact = accuracy.reference(*tensors, rows=torch.arange(128)).out
    half = peers.judge_peer(lambda: exact * 0.5, tensors, _args())
    assert half["rel_l1"] == pytest.approx(0.5)
    assert half["gain"] == pytest.approx(0.5)
    assert half["finite"]
