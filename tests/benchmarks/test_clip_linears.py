"""`benchmarks/clip_linears.py`: what it patches, and what a line says."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from sage_plugin.demo.quality import quality
from sage_plugin.plugin.options.checked import checked_options


def test_a_line_has_the_means_over_clips_and_the_worst_frame(monkeypatch: pytest.MonkeyPatch):
    module = importlib.import_module("clip_linears")
    black = np.zeros((2, 8, 8, 1), dtype=np.float32)
    gray = black.copy()
    gray[1] = 0.01
    rows = {"linears fp8_row": [quality(black + 0.1, black), quality(gray + 0.1, black)]}
    (line,) = module.lines_of(rows)
    assert "PSNR 19.79 dB (worst frame 19.17)" in line
    for options in module.VARIANTS.values():
        assert checked_options(
            options["kernel"], min_seq=0, on_unsupported="error", linears=options.get("linears"),
        )  # fmt: skip
