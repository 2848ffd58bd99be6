"""One patched denoiser: its layers, what they share, and the hook that notices a lost patch."""

from __future__ import annotations

import logging
from collections import Counter
from fnmatch import fnmatchcase
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sage_plugin import settings
from sage_plugin.errors import PatchError
from sage_plugin.plugin import retarget
from sage_plugin.plugin.context import LayerContext, PatchOptions, PatchState
from sage_plugin.plugin.counts import ComponentCounts, LayerCounts
from sage_plugin.plugin.hosts import diffusers, transformers
from sage_plugin.plugin.hosts.diffusers import attention_modules, components, unwrapped
from sage_plugin.plugin.steps.forward import ForwardCounter

if TYPE_CHECKING:
    from sage_plugin.plugin.patch import PatchHandle

logger = logging.getLogger(__name__)

EXCLUDED = "left out by include or exclude"
REPLACED = "processors were replaced"
NO_CALL = "the processor or forward in place makes no attention call that can be redirected"


class Component:
    """The patch of one module of a pipeline, or of a module that was given by itself.

    Attributes:
        module: the denoiser.
        state: what its layers share.
        handle: the handle that it belongs to.
        layers: patched layers by path inside the module.
        skipped: attention layers that are not patched, and why.
    """

    def __init__(self, module: nn.Module, state: PatchState, handle: PatchHandle) -> None:
        self.module = module
        self.state = state
        self.handle = handle
        state.forwards = ForwardCounter(module)
        self.layers: dict[str, LayerContext] = {}
        self.skipped: dict[str, str] = {}
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
        for layer in self.layers.values():
            layer.broken = None

    def cover(self, options: PatchOptions) -> None:
        """Patch the layers that the options choose, as the module is now, and put back the others.

        Raises:
            PatchError: a layer is patched through another module already.
        """
        found = {path: (module, proc) for path, module, proc in attention_modules(self.module)}
        chosen = [path for path in found if self._chosen(path, options)]
        for path in chosen:
            self._check_owner(path, *found[path])
        self.state.options = options
        self.state.disabled = settings.current().disabled
        for path in set(self.layers) - set(chosen):
            self._drop(path)
        self.skipped = {self._full(path): EXCLUDED for path in found if path not in chosen}
        for path in chosen:
            self._patch_layer(path, *found[path])

    def check(self) -> None:
        """Patch again where processors were replaced since; runs before each eager forward."""
        self.state.disabled = settings.current().disabled
        replaced = [
            layer
            for layer in self.layers.values()
            if _host(layer).standing(layer) is not _current(layer)
        ]
        if not replaced:
            return
        for path, layer in self.layers.items():
            if layer in replaced:
                self._patch_layer(path, layer.attention, _host(layer).found(layer))
        if REPLACED in self.state.warned:
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
        forward = self.state.forwards.begin(self.module, args, kwargs)
        if self.state.tracker is not None:
            self.state.tracker.enter(forward)

    def end(self) -> None:
        """Take note that an eager forward ended."""
        if self.state.tracker is not None:
            self.state.tracker.leave()

    def counts(self) -> ComponentCounts:
        """What its layers did since the last `patch`."""
        tracker = self.state.tracker
        return ComponentCounts(
            self.state.forwards.count,
            0 if tracker is None else tracker.passed,
            {path: layer.counts for path, layer in self.layers.items()},
        )

    def count_anew(self) -> None:
        """Begin new counts; the former ones stay with whoever has them."""
        self.count_on(ComponentCounts(0, 0, {path: LayerCounts() for path in self.layers}))

    def count_on(self, counts: ComponentCounts) -> None:
        """Go on from counts that another `patch` had set aside."""
        self.state.forwards.count = counts.forwards
        if self.state.tracker is not None:
            self.state.tracker.passed = counts.steps
        for path, layer in self.layers.items():
            layer.counts = counts.layers.get(path, layer.counts)

    def lost(self) -> tuple[str, ...]:
        """Names of the layers that were patched and are not now."""
        return tuple(
            layer.name
            for layer in self.layers.values()
            if layer.processor is None or _host(layer).standing(layer) is not layer.processor
        )

    def release(self) -> None:
        """Put every processor back and take the hooks away."""
        for layer in self.layers.values():
            _host(layer).put_back(layer)
        for hook in self._hooks:
            hook.remove()

    def rename(self, name: str) -> None:
        """Give the component, and so its layers, another name."""
        self.state.component = name
        for path, layer in self.layers.items():
            layer.name = self._full(path)

    def _check_owner(self, path: str, module: nn.Module, processor: object) -> None:
        owner = retarget.layer_of(processor)
        if owner is not None and owner.attention is module and owner.state is not self.state:
            raise PatchError(
                f"{self._full(path)} is patched already, as {owner.name}; unpatch that module first"
            )

    def _patch_layer(self, path: str, module: nn.Module, processor: object) -> None:
        layer = self.layers.get(path)
        if (
            layer is not None
            and layer.attention is module
            and layer.processor is _host(layer).standing(layer) is processor
        ):
            return
        if layer is None:
            layer = LayerContext(self._full(path), self.state, module, processor)
        # Our former copy may lie where upstream will take it from again.
        _host(layer).put_back(layer)
        layer.attention = module
        owner = retarget.layer_of(processor)
        layer.original = processor if owner is None else owner.original
        if _host(layer).swap(layer):
            self.layers[path] = layer
            self.skipped.pop(layer.name, None)
        else:
            self.skipped[layer.name] = NO_CALL

    def _drop(self, path: str) -> None:
        layer = self.layers.pop(path)
        _host(layer).put_back(layer)

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


def parts_of(obj: object) -> list[Component]:
    """The patched modules of a pipeline, or the patch of a module.

    Raises:
        PatchError: `obj` is neither a module nor a pipeline.
    """
    modules = [unwrapped(obj)] if isinstance(obj, nn.Module) else list(components(obj).values())
    if not modules:
        raise PatchError(
            f"got {type(obj).__name__}, expected a diffusers pipeline, its denoiser, or a module"
        )
    return [part for module in modules if (part := component_of(module)) is not None]


def _host(layer: LayerContext) -> ModuleType:
    """The library whose attention a layer is: an attention module of transformers is all of it."""
    return transformers if layer.original is layer.attention else diffusers


def _current(layer: LayerContext) -> object:
    return layer.original if layer.processor is None else layer.processor
