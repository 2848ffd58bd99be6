"""Tiny randomly initialised models of many families of diffusers, with what a forward does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.plugin.tiny_images import IMAGES
from tests.plugin.tiny_videos import VIDEOS

FAMILIES = {**IMAGES, **VIDEOS}


@dataclass
class Tiny:
    """A model and its inputs."""

    module: nn.Module
    inputs: dict[str, Any]

    def run(self) -> torch.Tensor:
        """All outputs in one row."""
        with torch.no_grad():
            made = self.module(**self.inputs, return_dict=False)
        return torch.cat([tensor.flatten() for tensor in _tensors(made)])


def tiny(name: str) -> Tiny:
    """A fresh copy of a family's model, the same each time."""
    return copy.deepcopy(_built(name))


@functools.cache
def _built(name: str) -> Tiny:
    torch.manual_seed(0)
    module, inputs = FAMILIES[name].build()
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any() or not parameter.isfinite().all():
                parameter.normal_(std=0.3)  # gates that start closed would hide attention
    return Tiny(module.eval(), inputs)


def _tensors(made: Any) -> Iterator[torch.Tensor]:
    if isinstance(made, torch.Tensor):
        yield made
    elif isinstance(made, list | tuple):
        for part in made:
            yield from _tensors(part)
