"""The forwards of a component, and what their arguments say of the denoising step."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

TIMESTEPS = ("timestep", "timesteps", "timestep_ratio", "t")
"""What denoisers call the argument."""

_TEXT_FIRST = "CogVideoX"
"""Models of this name put the text tokens in front of the video's in one sequence."""
_UNREAD = object()


class Timestep:
    """The timestep of a forward, read when somebody asks.

    Args:
        argument: what the model was called with, `None` where it has no timestep.
    """

    __slots__ = ("_argument", "_value")

    def __init__(self, argument: object) -> None:
        self._argument = argument
        self._value: Any = _UNREAD

    @property
    def value(self) -> float | None:
        """The number, the greatest where tokens have their own.

        Reading it waits for the device; it is not read while a CUDA graph is captured.
        """
        if self._value is _UNREAD:
            self._value = _as_number(self._argument)
        value: float | None = self._value
        return value

    def may_equal(self, other: Timestep) -> bool:
        """Whether another one is the same, or it cannot be told; what shares memory is not read."""
        mine, others = self._argument, other._argument
        if mine is others or (
            isinstance(mine, torch.Tensor)
            and isinstance(others, torch.Tensor)
            and mine.device.type != "meta"
            and mine.shape == others.shape
            and mine.data_ptr() == others.data_ptr()
        ):
            return True
        return None in (self.value, other.value) or self.value == other.value


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward of a component.

    Attributes:
        model: the component.
        index: how many forwards it had before.
        time: its timestep.
        text_length: leading text tokens of the joint sequence, or `None`.
    """

    model: nn.Module
    index: int
    time: Timestep
    text_length: int | None = None

    @property
    def timestep(self) -> float | None:
        """The value of its timestep; reading it waits for the device."""
        return self.time.value


class ForwardCounter:
    """Counts the eager forwards of one component.

    Args:
        model: the component, which is not kept alive; `None` where there is none.

    Attributes:
        count: forwards so far.
        listeners: called with each `Forward` as it begins.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model: weakref.ref[nn.Module] | None = None
        self.count = 0
        self.listeners: list[Callable[[Forward], None]] = []
        if model is not None:
            self.watch(model)

    def watch(self, model: nn.Module) -> None:
        """Count the forwards of a component from now on."""
        self._model = weakref.ref(model)

    @property
    def model(self) -> nn.Module | None:
        """The component."""
        return None if self._model is None else self._model()

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward:
        """Count a forward with these arguments, and tell the listeners."""
        named = {**_named(model, args), **kwargs}
        time = next((named[name] for name in TIMESTEPS if name in named), None)
        text = named.get("encoder_hidden_states")
        joint = isinstance(text, torch.Tensor) and type(model).__name__.startswith(_TEXT_FIRST)
        length = text.shape[1] if joint and text is not None else None
        forward = Forward(model, self.count, Timestep(time), length)
        self.count += 1
        for listener in tuple(self.listeners):
            listener(forward)
        return forward


def _as_number(value: object) -> float | None:
    if isinstance(value, torch.Tensor):
        if not value.numel() or (value.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        try:
            value = value.max().item()
        except RuntimeError:  # without data, or under a transform: a value that nobody can read
            return None
    return float(value) if isinstance(value, int | float) else None


def _named(model: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments by the names of the model's `forward`, as far as it names them."""
    if not args:
        return {}
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return {}
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return dict(zip((p.name for p in parameters if p.kind in plain), args, strict=False))
