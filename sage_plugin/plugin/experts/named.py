"""Our experts by name, in both registries that transformers has for them.

The two are separate and checked as one: a name in one alone passes the check and then fails.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sage_plugin import settings
from sage_plugin.plugin.context import PatchState
from sage_plugin.plugin.experts.layer import ExpertsLayer
from sage_plugin.plugin.hosts.transformers_dispatch import NAME

NAMED = "_sage_named_experts"
"""Where experts that run by the name have their `ExpertsLayer`."""

STOCK = "grouped_mm"
"""What runs the calls that no kernel takes."""

REGISTRIES = (
    ("transformers.integrations.moe", "ExpertsInterface"),
    ("transformers.integrations.finegrained_fp8", "FP8ExpertsInterface"),
)


class NamedExperts:
    """The experts that run by the name.

    Attributes:
        state: what they share with attention by the name.
        kernel: a quantized kernel, or `"auto"`.
    """

    def __init__(self, state: PatchState) -> None:
        self.state, self.kernel = state, "auto"
        self._layers: weakref.WeakSet[ExpertsLayer] = weakref.WeakSet()

    @property
    def layers(self) -> list[ExpertsLayer]:
        """What stands for each module that there is still."""
        return sorted(self._layers, key=lambda layer: layer.name)

    def enter(self) -> None:
        """Register the name in the registries that the installed release has."""
        for module, registry in REGISTRIES:
            interface: Any = getattr(importlib.import_module(module), registry, None)
            if interface is not None and STOCK in interface._global_mapping:
                interface.register(NAME, self._function(interface._global_mapping[STOCK]))

    def _function(self, stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def sage_plugin(
            module: nn.Module,
            hidden_states: torch.Tensor,
            top_k_index: torch.Tensor,
            top_k_weights: torch.Tensor,
        ) -> torch.Tensor:
            as_ever = functools.partial(stock, module)
            layer = vars(module).get(NAMED)
            if not torch.compiler.is_compiling():
                layer = self._settled(module, layer)
            elif layer is None:
                return as_ever(hidden_states, top_k_index, top_k_weights)
            return layer.run(module, as_ever, hidden_states, top_k_index, top_k_weights)

        return sage_plugin

    def _settled(self, module: nn.Module, layer: ExpertsLayer | None) -> ExpertsLayer:
        """What stands for a module, with its weights as they are now."""
        self.state.disabled = settings.current().disabled
        if layer is None:
            layer = ExpertsLayer(f"{NAME}.{type(module).__name__}", self.state, self.kernel)
            vars(module)[NAMED] = layer
            self._layers.add(layer)
        layer.kernel = self.kernel
        layer.settle(module)
        return layer
