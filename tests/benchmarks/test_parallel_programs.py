"""`benchmarks/parallel_steps.py` and `tensor_parallel.py`: two processes give what one gives."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAMS = {
    "parallel_steps": ["--models", "cogvideox-2b"],
    "tensor_parallel": ["--tokens", "64", "--layers", "2"],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_two_processes_are_as_exact_as_one(program: str, tmp_path: Path) -> None:
    options = ["--tiny", "--rounds", "2", "--kernels", "sage+int8_row", *PROGRAMS[program]]
    written = tmp_path / "result.json"
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", f"{program}.py",
         *options, "--output", str(written)],
        cwd=FOLDER, check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    facts = json.loads(written.read_text())
    rows = facts["models"][0]["rows"] if program == "parallel_steps" else facts["rows"]
    alone, *spread = (row for row in rows if row["kernel"] != "unpatched")
    assert 0.005 < alone["error"] < 0.05
    assert spread
    for row in spread:
        assert row["error"] == pytest.approx(alone["error"], rel=0.2)
        assert sum(row["ran"].values()) == sum(alone["ran"].values()) + 2 * (
            row.get("way") == "ring"
        )
        assert not any(label.startswith("fallback") for label in row["ran"])


def test_a_program_says_how_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with (
        pytest.raises(SystemExit, match="torchrun"),
        importlib.import_module("parallel_run").place(),
    ):
        pass


def test_outputs_of_linears_are_as_large_as_their_inputs() -> None:
    linear = torch.nn.Linear(256, 64)
    linear.weight.data.mul_(100.0)
    importlib.import_module("parallel_steps").keep_magnitudes(linear)
    assert float(linear(torch.randn(500, 256)).detach().std()) == pytest.approx(1.0, rel=0.1)
