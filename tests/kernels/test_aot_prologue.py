"""The prologue compiled ahead of time for GPUs that are not here: it fits, with hardly a spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")

from sage_plugin.kernels.support import ARCHITECTURES  # noqa: E402
from scripts.aot_prologue import FORMS  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SPILL_LIMIT_BYTES = 16
"""A value or two, which ptxas puts aside on sm_100."""
EVERY = [row.names[0] for row in ARCHITECTURES if row.kernels and row.triton == "3.6"]


def check(*architectures: str) -> None:
    """Every form compiles for some architectures."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.aot_prologue", *architectures],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == len(FORMS) * len(architectures)
    for one in made:
        assert one["smem_bytes"] <= one["limit_bytes"], one
        assert one["spill_bytes"] <= SPILL_LIMIT_BYTES, one
        assert one["registers"] <= 232, one


def test_every_form_compiles_and_fits():
    check("sm_90")


@pytest.mark.sweep
@pytest.mark.parametrize("arch", EVERY)
def test_every_form_compiles_for_every_architecture(arch):
    check(arch)
