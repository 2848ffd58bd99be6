"""`benchmarks/continuous_batching.py`: ways take turns after a warm-up, texts are compared."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
from sage_plugin.plugin.hosts.eight_bit_pages import CACHE

if importlib.util.find_spec(f"{CACHE}_allocators") is None:
    pytest.skip("this transformers has no such caches", allow_module_level=True)


def test_ways_are_timed_in_turns_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = importlib.import_module("continuous_batching")
    seen: list[tuple[str, int]] = []

    def run(model: object, prompts: list[list[int]], args: object) -> tuple[object, float]:
        config = model.config  # type: ignore[attr-defined]
        seen.append((config._attn_implementation, sum(map(len, prompts))))
        turn, place = divmod(len(seen) - 1, 2)
        other = 7 if place and turn == 2 else 5
        return [[5, 5], [5, other]], (100.0, 1.0, 4.0)[turn] * (1 + place)

    monkeypatch.setattr(program, "run", run)
    program.main([
        "--output", str(tmp_path / "out.json"), "--model", "tiny", "--ways", "sdpa", "int8",
        "--requests", "2", "--new-tokens", "2", "--longest", "9", "--rounds", "2",
        "--commit", "x",
    ])  # fmt: skip
    assert [name for name, _ in seen] == ["sdpa", "sage_plugin_flash"] * 3
    assert len({tokens for _, tokens in seen}) == 1
    stock, ours = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (stock["seconds"], ours["seconds"]) == ([1.0, 4.0], [2.0, 8.0])
    assert (stock["tokens_per_s"], ours["tokens_per_s"]) == (4 / 2.5, 4 / 5.0)
    assert (stock["equal_tokens"], ours["equal_tokens"]) == (1.0, 0.75)
