"""The experts of one patched component."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import nn

from sage_plugin.errors import PatchError
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.plugin.context import PatchState
from sage_plugin.plugin.counts import LayerCounts
from sage_plugin.plugin.experts.eligible import find_experts
from sage_plugin.plugin.experts.layer import ExpertsLayer, layer_in
from sage_plugin.plugin.experts.module import put_back, swap

if TYPE_CHECKING:
    from sage_plugin.plugin.linears.part import LinearChoice

Wanted = Callable[[str], "LinearChoice | FallbackReason"]
"""What the experts at a path run on, or why they run as ever; none are rotated or smoothed."""


class ExpertsPart:
    """The experts of a component, which shares its state with them.

    Attributes:
        layers: patched experts by path inside the component.
        left: experts that run as ever by path, and why.
    """

    def __init__(self, state: PatchState, wanted: Wanted) -> None:
        self.state, self._wanted = state, wanted
        self.layers: dict[str, ExpertsLayer] = {}
        self.left: dict[str, FallbackReason] = {}
        self._modules: dict[str, weakref.ref[nn.Module]] = {}

    def cover(self, model: nn.Module | None) -> None:
        """Patch the experts that the state's options choose, and put back the others.

        Raises:
            PatchError: one whose originals were freed would have to be put back, or another patch
                has one.
        """
        options = self.state.options
        found = find_experts(model) if model is not None and options.has_linears else {}
        wanted = {path: self._wanted(path) for path in found}
        self.left = {path: w for path, w in wanted.items() if isinstance(w, FallbackReason)}
        chosen = {path: w for path, w in wanted.items() if not isinstance(w, FallbackReason)}
        former = {id(module): (layer, module) for layer, module in self._patched().values()}
        layers = {}
        for path, choice in chosen.items():
            module, keep = found[path], options.keep_originals
            layer = self._own(path, module)
            if layer is not None and (layer.kernel, layer.keep) == (choice.kernel, keep):
                del former[id(module)]
            else:
                layer = ExpertsLayer("", self.state, choice.kernel, keep=keep)
            layer.rule, layers[path] = choice.rule, layer
        for layer, _ in former.values():
            layer.check_original()
        for _, module in former.values():
            put_back(module)
        for path, layer in layers.items():
            if layer_in(found[path]) is not layer:
                swap(found[path], layer)
        self.layers, self._modules = layers, {p: weakref.ref(found[p]) for p in layers}
        self.rename(self.state.component)
        self.settle()

    def settle(self) -> None:
        """Quantize what was written or moved since; runs before each eager forward."""
        for layer, module in self._patched().values():
            layer.settle(module)

    def distrust(self) -> None:
        """Quantize all weights anew: they may have been written unseen."""
        for layer in self.layers.values():
            layer.distrust()
        self.settle()

    def names(self) -> list[str]:
        """Return the names of all experts that rules may name."""
        return [f"{self.state.component}.{path}" for path in (*self.layers, *self.left)]

    def check_originals(self) -> None:
        """Raise where experts cannot be put back.

        Raises:
            PatchError: originals were freed.
        """
        for layer in self.layers.values():
            layer.check_original()

    def release(self) -> None:
        """Put all back, for good."""
        for _, module in self._patched().values():
            put_back(module)
        self.layers = {}

    def rename(self, component: str) -> None:
        """Give the component, and so its experts, another name."""
        for path, layer in self.layers.items():
            layer.name = f"{component}.{path}" if path else component

    def count_on(self, counts: dict[str, LayerCounts]) -> None:
        """Go on from counts that another `patch` had set aside, from 0 where there are none."""
        for path, layer in self.layers.items():
            layer.counts = counts.get(path) or LayerCounts()

    def left_out(self, model: nn.Module | None) -> dict[str, FallbackReason]:
        """Experts that run as ever, and why; also those that came in since."""
        if model is None or not self.state.options.has_linears:
            return {}
        new = {
            path: FallbackReason(Fallback.LINEAR_NEW)
            for path, module in find_experts(model).items()
            if layer_in(module) is None and path not in self.left
        }
        stayed = {p: x.left for p, x in self.layers.items() if x.left is not None}
        return self.left | stayed | new

    def lost(self, model: nn.Module | None) -> Iterator[str]:
        """Names of the experts that the model has no more."""
        here = set() if model is None else set(map(id, model.modules()))
        for layer, module in self._patched().values():
            if id(module) not in here:
                yield layer.name

    def _own(self, path: str, module: nn.Module) -> ExpertsLayer | None:
        """The layer of this component that experts have.

        Raises:
            PatchError: another patch has them.
        """
        layer: ExpertsLayer | None = layer_in(module)
        if layer is not None and layer.state is not self.state:
            raise PatchError(
                f"{self.state.component}.{path} is patched already, as {layer.name}; unpatch that "
                "module first"
            )
        return layer

    def _patched(self) -> dict[str, tuple[ExpertsLayer, nn.Module]]:
        """Patched experts whose module there is still, by path."""
        found = {}
        for path, layer in self.layers.items():
            module = self._modules[path]()
            if module is not None and layer_in(module) is layer:
                found[path] = (layer, module)
        return found
