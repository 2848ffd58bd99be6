"""Counts the forwards of a component, and keeps what their arguments say of the denoising step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

WRAPPER = "_orig_mod"
"""Name of the model inside what `torch.compile(model)` returns."""

_TEXT_FIRST = "CogVideoX"
"""Models of this name put the text tokens in front of the video's in one sequence."""


class ForwardWatch:
    """The current forward of one component.

    Args:
        model: the component.
        first_step: index that the next forward gets.
        on_begin: called at the start of each forward, with its timestep.

    Attributes:
        model: the component, without a compiled wrapper.
        step: index of the current forward, one less than `first_step` before it.
        text_length: leading text tokens of the joint sequence, or `None`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        first_step: int = 0,
        on_begin: Callable[[float | None], None] = lambda _: None,
    ) -> None:
        self.model: nn.Module = getattr(model, WRAPPER, model)
        self.step = first_step - 1
        self.text_length: int | None = None
        self._timestep: Any = None
        self._on_begin = on_begin
        self._hook: RemovableHandle | None = None

    @property
    def timestep(self) -> float | None:
        """The model's own timestep, the greatest where tokens have their own.

        Reading it waits for the device; it is not read while a CUDA graph is captured.
        """
        value = self._timestep
        if isinstance(value, torch.Tensor):
            if value.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            value = value.max().item() if value.numel() else None
        return float(value) if isinstance(value, int | float) else None

    def start(self) -> None:
        """Watch from the next forward on."""
        self._hook = self.model.register_forward_pre_hook(self.begin, with_kwargs=True)

    def stop(self) -> None:
        """Watch no more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Enter the next forward; a pre-hook."""
        if torch.compiler.is_compiling():
            return
        self.step += 1
        named = {**_named(self.model, args), **kwargs}
        self._timestep = named.get("timestep")
        text = named.get("encoder_hidden_states")
        self.text_length = None
        if type(self.model).__name__.startswith(_TEXT_FIRST) and isinstance(text, torch.Tensor):
            self.text_length = text.shape[1]
        self._on_begin(self.timestep)


def is_compiled(obj: object) -> bool:
    """Whether a model, a pipeline's component, or a part of one was handed to `torch.compile`."""
    parts = [obj] if isinstance(obj, nn.Module) else list(getattr(obj, "components", {}).values())
    return any(
        module._compiled_call_impl is not None or WRAPPER in module._modules
        for part in parts
        if isinstance(part, nn.Module)
        for module in part.modules()
    )


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
