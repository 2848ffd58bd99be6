"""The patches in what a user holds: a model, a wrapper of a patched one, or what was inside."""

from __future__ import annotations

from torch import nn

from sage_plugin.errors import PatchError
from sage_plugin.plugin.component import Component, component_of
from sage_plugin.plugin.hosts.diffusers import attention_modules, components, unwrapped
from sage_plugin.plugin.twin import layer_of


def owners_of(module: nn.Module) -> list[Component]:
    """The patches of layers in a module, through whatever module they were patched."""
    found: dict[int, Component] = {}
    for child in module.modules():
        layer = layer_of(child)
        owner = component_of(child) if layer is None else layer.state.owner
        if owner is not None:
            found[id(owner)] = owner
    return list(found.values())


def part_of(module: nn.Module) -> Component | None:
    """The patch that a second `patch` of a module changes: its own, or that of all that it holds.

    The latter where a wrapper was patched, or the module inside of one.
    """
    own = component_of(module)
    if own is not None:
        return own
    owners = owners_of(module)
    if len(owners) != 1 or not owners[0].lies_in(module):
        return None
    known = owners[0].attention()
    inside = {attention for _, attention, _ in attention_modules(module)}
    return owners[0] if inside <= known else None


def parts_of(obj: object) -> list[Component]:
    """The patches in a pipeline or a module.

    Raises:
        PatchError: `obj` is neither a module nor a pipeline, or a part of what was patched.
    """
    owners = [(part, module) for module in modules_of(obj) for part in owners_of(module)]
    whole = {id(part): part for part, module in owners if part.lies_in(module)}
    if owners and not whole:
        raise PatchError(
            f"{type(obj).__name__} is a part of what was patched as "
            f"{owners[0][0].state.component!r}; pass that, or use the handle that patch() returned"
        )
    for part, module in owners:
        if part.module is None and id(part) in whole:  # a wrapper that the module was taken out of
            part.move(module)
    return list(whole.values())


def modules_of(obj: object) -> list[nn.Module]:
    """The modules of a pipeline, or the module inside of what `torch.compile` made.

    Raises:
        PatchError: `obj` is neither a module nor a pipeline.
    """
    modules = [unwrapped(obj)] if isinstance(obj, nn.Module) else list(components(obj).values())
    if not modules:
        raise PatchError(
            f"got {type(obj).__name__}, expected a diffusers pipeline, its denoiser, or a module"
        )
    return modules
