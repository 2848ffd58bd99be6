"""Distances of latents from the host's, step by step."""

from __future__ import annotations

import math

import pytest
import torch

from sage_plugin.bench.clips.latent_drift import LatentDrift
from sage_plugin.errors import UsageError


def test_relative_l2_by_step():
    drift = LatentDrift()
    drift.keep(torch.tensor([[3.0, 4.0]]))
    drift.keep(torch.tensor([[0.0, 10.0]]))
    assert len(drift) == 2
    assert drift.distance(0, torch.tensor([[3.0, 4.0]])) == 0.0
    assert drift.distance(0, torch.tensor([[3.0, 4.5]])) == pytest.approx(0.1)
    assert drift.distance(1, torch.tensor([[0.0, 12.0]])) == pytest.approx(0.2)


def test_what_is_kept_does_not_change_with_the_pipelines_tensor():
    drift, latents = LatentDrift(), torch.ones(2)
    drift.keep(latents)
    latents.zero_()
    assert drift.distance(0, torch.ones(2)) == 0.0


def test_half_precision_is_compared_in_full():
    drift = LatentDrift()
    drift.keep(torch.full((4,), 1.0, dtype=torch.bfloat16))
    assert drift.distance(0, torch.full((4,), 1.0 + 2**-7, dtype=torch.bfloat16)) == 2**-7


def test_latents_of_zero():
    drift = LatentDrift()
    drift.keep(torch.zeros(2))
    assert drift.distance(0, torch.zeros(2)) == 0.0
    assert drift.distance(0, torch.ones(2)) == math.inf


def test_a_step_that_the_host_did_not_have():
    drift = LatentDrift()
    drift.keep(torch.ones(2))
    with pytest.raises(UsageError, match="more than the 1 denoising steps of the baseline"):
        drift.distance(1, torch.ones(2))
