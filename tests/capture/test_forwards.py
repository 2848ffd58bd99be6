"""Steps, timesteps and text lengths, however a model is called."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sage_plugin.capture.recording.forwards import ForwardWatch
from sage_plugin.capture.recording.origin import origin_of


class Denoiser(nn.Module):
    def forward(self, sample, timestep=None, encoder_hidden_states=None, *rest, **more):
        return sample


class CogVideoXLike(Denoiser):
    pass


def watched(model: nn.Module) -> ForwardWatch:
    watch = ForwardWatch(model)
    watch.start()
    return watch


@pytest.mark.parametrize(
    ("timestep", "value"),
    [
        (torch.tensor([7, 7]), 7.0),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor([[0.0, 4.0]]), 4.0),
        (torch.tensor([]), None),
        (12, 12.0),
        (0.25, 0.25),
        (None, None),
        ("late", None),
    ],
)
@pytest.mark.parametrize("keyword", [True, False])
def test_timesteps(timestep, value, keyword):
    model = Denoiser()
    watch = watched(model)
    model(1, timestep=timestep) if keyword else model(1, timestep)
    assert watch.timestep == value


def test_steps_and_text_length():
    model = CogVideoXLike()
    watch = watched(model)
    assert watch.step == -1
    model(1, 2, torch.zeros(2, 226, 8))
    assert (watch.step, watch.text_length) == (0, 226)
    model(1)
    assert (watch.step, watch.text_length) == (1, None)
    watch.stop()
    model(1)
    assert watch.step == 1
    other = Denoiser()
    watch = watched(other)
    other(1, encoder_hidden_states=torch.zeros(2, 226, 8))
    assert watch.text_length is None


def test_models_with_configs_hash_alike_wherever_they_lie():
    model = nn.Linear(1, 1)
    assert origin_of(model).config_hash == ""
    hashes = set()
    for path in ("/a", "/b"):
        model.config = {"layers": 2, "_name_or_path": path}
        hashes.add(origin_of(model).config_hash)
    model.config = {"layers": 3}
    hashes.add(origin_of(model).config_hash)
    assert len(hashes) == 2
