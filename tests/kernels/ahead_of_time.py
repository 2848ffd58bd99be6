"""Scripts that compile kernels for GPUs that are not here, in a process without the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def compiled_by(script: str, *words: str) -> list[dict[str, Any]]:
    """What came out of each launch; a compiler that fails is the test's failure."""
    done = subprocess.run(
        [sys.executable, "-m", f"scripts.{script}", *words], cwd=ROOT, capture_output=True,
        text=True, timeout=280, check=False,
        env={**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
