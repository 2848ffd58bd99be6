"""One patched denoiser: its layers, what they share, and the hook that notices a lost patch."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from fnmatch import fnmatchcase
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sage_plugin import settings
from sage_plugin.errors import PatchError
from sage_plugin.plugin.context import LayerContext, PatchOptions, PatchState
from sage_plugin.plugin.counts import ComponentCounts, LayerCounts
from sage_plugin.plugin.experts.part import ExpertsPart
from sage_plugin.plugin.hosts import diffusers, transformers
from sage_plugin.plugin.hosts.diffusers import attention_modules
from sage_plugin.plugin.linears.part import LinearPart
from sage_plugin.plugin.policy.rules import LINEARS
from sage_plugin.plugin.twin import layer_of, original_class, original_of

if TYPE_CHECKING:
    from sage_plugin.plugin.patch import PatchHandle

logger = logging.getLogger(__name__)

EXCLUDED = "left out by include or exclude"
OF_TRANSFORMERS = "in a model of transformers inside of this one; patch that by itself"
REPLACED = "processors were replaced"
NEW = "came in after patch; call refresh"


lock = threading.RLock()
"""Held while layers are patched or put back: at `patch`, `refresh` and `unpatch`, and by a forward
that finds processors replaced."""


class Component:
    """The patch of one module of a pipeline, or of a module that was given by itself.

    It does not keep the module alive: the layers of the module keep it.

    Attributes:
        state: what its layers share.
        handle: the handle that it belongs to.
        layers: patched layers by path inside the module.
        skipped: attention layers that are not patched, and why.
        linears: its linear layers.
        experts: its mixtures of experts.
    """

    def __init__(self, module: nn.Module, state: PatchState, handle: PatchHandle) -> None:
        self.state = state
        self.handle = handle
        self.layers: dict[str, LayerContext] = {}
        self.skipped: dict[str, str] = {}
        self.linears = LinearPart(state)
        self.experts = ExpertsPart(
            state, lambda path: self.linears.kernel_at(path, self.state.options, LINEARS)
        )
        self._released = False
        self._hooks: list[RemovableHandle] = []
        self.move(module)
        state.owner = self

    @property
    def module(self) -> nn.Module | None:
        """The denoiser, `None` when it is gone."""
        return self._module()

    def move(self, module: nn.Module) -> None:
        """Belong to another module that has the same layers, such as one inside of a wrapper."""
        for hook in self._hooks:
            hook.remove()
        self._module = weakref.ref(module)
        self.state.forwards.watch(module)
        self._hooks = [
            module.register_forward_pre_hook(Watch(self), with_kwargs=True),
            module.register_forward_hook(ForwardEnd(self), always_call=True),
        ]

    def apply(self, options: PatchOptions) -> None:
        """Take over other options, and forget what failed under the former ones.

        Raises:
            PatchError: a layer is patched through another module already.
        """
        self.cover(options)
        self.state.warned.clear()
        self.state.unbuilt.clear()
        self.state.prologues.clear()
        for layer in self.layers.values():
            layer.broken = None

    def cover(self, options: PatchOptions) -> None:
        """Patch the layers that the options choose, as the module is now, and put back the others.

        Raises:
            PatchError: a layer is patched through another module already.
        """
        found = self._found()
        chosen = [path for path in found if self._chosen(path, options)]
        for path in chosen:
            self._check_owner(path, found[path][0])
        self.state.options = options
        self.state.disabled = settings.current().disabled
        former = {id(layer.attention): layer for layer in self.layers.values()}
        layers: dict[str, LayerContext] = {}
        for path in chosen:
            module, standing = found[path]
            known = former.pop(id(module)) if id(module) in former else None
            layers[path] = known or LayerContext(
                path, self.state, module, None, attends_itself=standing is module
            )
        originals = {path: _original(x, found[path][1]) for path, x in layers.items()}
        for layer in former.values():
            _host(layer).put_back(layer)
        kept, self.layers = set(self.layers.values()), layers
        self.rename(self.state.component)
        self.skipped = {self._full(path): EXCLUDED for path in found if path not in chosen}
        for path, layer in layers.items():
            self._patch_layer(layer, originals[path])
        self.layers = {p: x for p, x in layers.items() if x in kept or x.processor is not None}
        self.linears.cover(self.module, found)
        self.experts.cover(self.module)

    def check(self) -> None:
        """Patch again what was replaced or written since; runs before each eager forward."""
        self.state.disabled = settings.current().disabled
        self.linears.settle()
        self.experts.settle()
        if not self._replaced():
            return
        with lock:
            replaced = [] if self._released else self._replaced()
            for layer in replaced:
                self._patch_layer(layer, _original(layer, _host(layer).found(layer)))
        if not replaced or REPLACED in self.state.warned:
            return
        self.state.warned.add(REPLACED)
        failed = sum(layer.processor is None for layer in replaced)
        logger.warning(
            "%s: the attention processors of %d layers (the first is %s) were replaced after "
            "patching: %d are patched again, %d cannot be and run the host's attention (said once)",
            self.state.component, len(replaced), replaced[0].name, len(replaced) - failed, failed,
        )  # fmt: skip

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count an eager forward, and find the denoising step that it belongs to."""
        self.state.running += 1
        model = self.module
        if model is None:
            return
        forward = self.state.forwards.begin(model, args, kwargs)
        if self.state.tracker is not None:
            self.state.tracker.enter(forward)

    def end(self) -> None:
        """Take note that an eager forward ended."""
        self.state.running -= 1
        if self.state.tracker is not None:
            self.state.tracker.leave()

    def counts(self) -> ComponentCounts:
        """What its layers did since the last `patch`."""
        tracker = self.state.tracker
        return ComponentCounts(
            self.state.forwards.count,
            0 if tracker is None else tracker.passed,
            {path: layer.counts for path, layer in self.layers.items()},
            {path: x.counts for path, x in (self.linears.layers | self.experts.layers).items()},
        )

    def every_count(self) -> list[LayerCounts]:
        """The counts of all its layers, linears and experts."""
        counts = self.counts()
        return [*counts.layers.values(), *counts.linears.values()]

    def count_anew(self) -> None:
        """Begin new counts; the former ones stay with whoever has them."""
        self.count_on(ComponentCounts(0, 0, {path: LayerCounts() for path in self.layers}, {}))

    def count_on(self, counts: ComponentCounts) -> None:
        """Go on from counts that another `patch` had set aside."""
        self.state.forwards.count = counts.forwards
        if self.state.tracker is not None:
            self.state.tracker.passed = counts.steps
        for path, layer in self.layers.items():
            layer.counts = counts.layers.get(path, layer.counts)
        self.linears.count_on(counts.linears)
        self.experts.count_on(counts.linears)

    def lost(self) -> tuple[str, ...]:
        """Names of the layers that were patched and are not now, or that the module has no more."""
        here = {id(module) for module, _ in self._found().values()}
        attention = (
            layer.name
            for layer in self.layers.values()
            if (module := layer.attention) is not None
            and (id(module) not in here or not _stands(layer))
        )
        return (
            *attention, *self.linears.lost(self.module), *self.experts.lost(self.module)
        )  # fmt: skip

    def left_out(self) -> dict[str, str]:
        """Attention layers of the module, as it is now, that are not patched, and why."""
        patched, found = {id(layer.attention) for layer in self.layers.values()}, self._found()
        new = {
            name: NEW
            for path, (module, _) in found.items()
            if id(module) not in patched and (name := self._full(path)) not in self.skipped
        }
        root = self.module
        inside = {
            self._full(path): OF_TRANSFORMERS
            for path, _, _ in (() if root is None else transformers.attention_modules(root))
            if path not in found
        }
        return self.skipped | new | inside

    def linears_left(self) -> dict[str, str]:
        """Linears and experts of the module, as it is now, that run as ever, and why."""
        left = self.linears.left_out(self.module, self._found())
        left |= self.experts.left_out(self.module)
        return {self._full(path): str(reason) for path, reason in left.items()}

    def release(self) -> None:
        """Put everything back and take the hooks away, for good.

        Raises:
            PatchError: the original weights of linears were freed.
        """
        self.linears.check_originals()
        self.experts.check_originals()
        self._released = True
        self.linears.release()
        self.experts.release()
        for layer in self.layers.values():
            _host(layer).put_back(layer)
        for hook in self._hooks:
            hook.remove()

    def rename(self, name: str) -> None:
        """Give the component, and so its layers, another name."""
        self.state.component = name
        for path, layer in self.layers.items():
            layer.name = self._full(path)
        self.linears.rename(name)
        self.experts.rename(name)

    def attention(self) -> set[nn.Module]:
        """The attention modules that it knows, as far as its module has them now."""
        known = {id(layer.attention) for layer in self.layers.values()}
        found = {
            attention
            for path, (attention, _) in self._found().items()
            if id(attention) in known or self._full(path) in self.skipped
        }
        live = (layer.attention for layer in self.layers.values())
        return found if self.module is not None else {x for x in live if x is not None}

    def lies_in(self, module: nn.Module) -> bool:
        """Whether all of its attention is in a module."""
        return self.attention() <= set(module.modules())

    def _found(self) -> dict[str, tuple[nn.Module, object]]:
        """Attention modules and what there is to patch in each, by path, as the module is now."""
        module = self.module
        found = () if module is None else attention_modules(module)
        return {path: (attention, processor) for path, attention, processor in found}

    def _replaced(self) -> list[LayerContext]:
        """Layers in whose place there is not what we left."""
        return [
            layer
            for layer in self.layers.values()
            if _host(layer).standing(layer) is not _current(layer)
        ]

    def _check_owner(self, path: str, module: nn.Module) -> None:
        owner = layer_of(module)
        if owner is not None and owner.attention is module and owner.state is not self.state:
            raise PatchError(
                f"{self._full(path)} is patched already, as {owner.name}; unpatch that module first"
            )

    def _patch_layer(self, layer: LayerContext, original: object) -> None:
        """Patch a layer whose place has what is `original` unpatched, if it is not patched."""
        if _stands(layer):
            return
        # Our former twin may lie where upstream will take it from again.
        _host(layer).put_back(layer)
        layer.original = original
        reason = _host(layer).swap(layer)
        if reason is None:
            self.skipped.pop(layer.name, None)
        else:
            self.skipped[layer.name] = reason

    def _chosen(self, path: str, options: PatchOptions) -> bool:
        def matches(globs: tuple[str, ...]) -> bool:
            names = (path, self._full(path))
            return any(fnmatchcase(name, glob) for name in names for glob in globs)

        return (options.include is None or matches(options.include)) and not matches(
            options.exclude
        )

    def _full(self, path: str) -> str:
        return f"{self.state.component}.{path}" if path else self.state.component


class Watch:
    """Forward pre-hook of a patched module, by which the module is known to be patched."""

    def __init__(self, component: Component | None = None) -> None:
        self.component = component

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the patch; in a graph, where processors cannot change, do nothing."""
        if torch.compiler.is_compiling() or self.component is None:
            return
        self.component.check()
        self.component.begin(args, kwargs)

    def __reduce__(self) -> tuple[type[Watch], tuple[()]]:
        """A copy of a patched module is not patched."""
        return Watch, ()


class ForwardEnd:
    """Forward hook of a patched module: after the first eager forward it says what ran where."""

    def __init__(self, component: Component | None = None) -> None:
        self.component = component
        self._said = False

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        """End the forward; log one line, once a patch. After an exception there is no output."""
        if torch.compiler.is_compiling() or self.component is None:
            return
        self.component.end()
        if self._said or output is None:
            return
        self._said = True
        calls: Counter[str] = Counter()
        for layer in self.component.layers.values():
            calls += layer.counts.calls
            calls["the model's own attention"] += layer.counts.fallbacks.total()
        told = ", ".join(f"{count} on {label}" for label, count in calls.items() if count)
        logger.info(
            "%s: attention calls of the first forward: %s",
            self.component.state.component, told or "none",
        )  # fmt: skip

    def __reduce__(self) -> tuple[type[ForwardEnd], tuple[()]]:
        """A copy of a patched module is not patched."""
        return ForwardEnd, ()


def component_of(module: nn.Module) -> Component | None:
    """The patch of a module, or `None`."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, Watch) and hook.component is not None:
            return hook.component
    return None


def _host(layer: LayerContext) -> ModuleType:
    """The library whose attention a layer is: an attention module of transformers is all of it."""
    return transformers if layer.attends_itself else diffusers


def _original(layer: LayerContext, found: object) -> object:
    """What there is to patch in a layer's place, as it is unpatched."""
    return original_class(found) if layer.attends_itself else original_of(found)


def _current(layer: LayerContext) -> object:
    return layer.original if layer.processor is None else layer.processor


def _stands(layer: LayerContext) -> bool:
    """Whether what we put into a layer's place is there."""
    return layer.processor is not None and _host(layer).standing(layer) is layer.processor
