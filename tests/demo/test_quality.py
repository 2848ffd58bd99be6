"""PSNR and SSIM of clips whose distance is known."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from sage_plugin.demo.quality import psnr_db, quality
from sage_plugin.errors import DeviceError

pytest.importorskip("skimage")


def test_quality_of_known_frames():
    rng = np.random.default_rng(0)
    clip = rng.random((3, 16, 16, 3), dtype=np.float32) * 0.8
    moved = clip.copy()
    moved[1] += 0.1
    found = quality(moved, clip)
    assert found.psnr_db[0] == found.psnr_db[2] == math.inf
    assert found.psnr_db[1] == pytest.approx(20.0, abs=1e-4)  # mse 0.01
    assert found.min_psnr_db == found.psnr_db[1]
    assert found.ssim[0] == 1.0
    assert found.summary()["min_ssim"] == found.ssim[1] < 1.0
    assert found.summary()["mean_ssim"] == pytest.approx(sum(found.ssim) / 3)
    gray = quality(clip[..., :1], clip[..., :1])
    assert gray.mean_psnr_db == math.inf


def test_the_mean_is_of_decibels_not_of_errors():
    clip = np.full((2, 8, 8, 1), 0.5, dtype=np.float32)
    other = clip + np.array([0.1, 0.01], dtype=np.float32).reshape(2, 1, 1, 1)
    found = quality(other, clip)
    assert found.mean_psnr_db == pytest.approx(30.0, abs=1e-3)
    assert found.min_psnr_db == pytest.approx(20.0, abs=1e-3)


def test_psnr_of_a_mean_squared_error():
    assert psnr_db(1e-3) == pytest.approx(30.0)
    assert psnr_db(0.0) == math.inf


def test_clips_of_two_lengths_are_no_pair():
    clip = np.zeros((2, 8, 8, 1))
    with pytest.raises(ValueError, match="argument 2 is longer"):
        quality(clip[:1], clip)


def test_without_scikit_image_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage.metrics", None)
    with pytest.raises(DeviceError, match=r"pip install 'sage-plugin\[media\]'"):
        quality(np.zeros((1, 8, 8, 1)), np.zeros((1, 8, 8, 1)))
