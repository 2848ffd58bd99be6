"""Steps, timesteps and text lengths, however a model is called."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sage_plugin.capture.recording.origin import origin_of
from sage_plugin.plugin.steps.forward import Forward, ForwardCounter, Timestep


class Denoiser(nn.Module):
    def forward(self, sample, timestep=None, encoder_hidden_states=None, *rest, **more):
        return sample


class CogVideoXLike(Denoiser):
    pass


def forward_of(model: nn.Module, *args, **kwargs) -> Forward:
    """What the counter makes of a call."""
    return ForwardCounter(model).begin(model, args, kwargs)


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
    call = forward_of(model, 1, timestep=timestep) if keyword else forward_of(model, 1, timestep)
    assert call.timestep == value


def test_forwards_are_counted_and_told():
    model, told = CogVideoXLike(), []
    counter = ForwardCounter(model)
    counter.listeners.append(told.append)
    first = counter.begin(model, (1, 2, torch.zeros(2, 226, 8)), {})
    second = counter.begin(model, (1,), {})
    assert told == [first, second]
    assert [(f.index, f.text_length, f.timestep) for f in told] == [(0, 226, 2.0), (1, None, None)]
    assert counter.count == 2
    other = forward_of(Denoiser(), 1, encoder_hidden_states=torch.zeros(2, 226, 8))
    assert other.text_length is None
    assert counter.model is model
    del model, told, first, second
    counter.listeners.clear()
    assert counter.model is None


class Unread(torch.Tensor):
    """Raises where its value is read."""

    def max(self):
        raise AssertionError("read")


def test_timesteps_that_share_memory_are_not_read():
    base = torch.arange(4.0).as_subclass(Unread)
    assert Timestep(base[1].expand(2)).may_equal(Timestep(base[1].expand(2)))
    with pytest.raises(AssertionError, match="read"):
        Timestep(base[1]).may_equal(Timestep(base[2]))
    assert Timestep(torch.tensor(3.0)).may_equal(Timestep(3))
    assert not Timestep(torch.tensor(3.0)).may_equal(Timestep(2.5))
    assert Timestep(None).may_equal(Timestep(3))
    assert Timestep(torch.empty(2, device="meta")).may_equal(Timestep(3))


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
