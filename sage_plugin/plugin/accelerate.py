"""`accelerate`: attention, linears and compiled blocks in one line, told and undone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Self

from torch import nn

from sage_plugin.errors import UsageError, number_of
from sage_plugin.plugin.component import Component
from sage_plugin.plugin.experts.layer import ExpertsLayer
from sage_plugin.plugin.hosts.diffusers import attention_modules
from sage_plugin.plugin.linears.layer import LinearLayer
from sage_plugin.plugin.linears.roles import blocks_of
from sage_plugin.plugin.patch import PatchHandle, patch
from sage_plugin.plugin.policy.rules import LINEARS, Policy
from sage_plugin.plugin.policy.rules import chosen as chosen_policy
from sage_plugin.plugin.report import PluginReport

MEBIBYTE = 1 << 20


class Acceleration:
    """What `accelerate` did: print it, ask what ran, undo it.

    Attributes:
        handle: the handle of the patch.
        compiled: blocks that were compiled, by name of the component.
    """

    def __init__(self, handle: PatchHandle, compiled: dict[str, list[nn.Module]]) -> None:
        self.handle, self.compiled = handle, compiled
        self._told = "\n".join(_lines(handle, compiled))

    def undo(self) -> None:
        """Put everything back; again does nothing.

        Raises:
            PatchError: original weights were freed by a later `patch`.
        """
        self.handle.unpatch()
        for blocks in self.compiled.values():
            for block in blocks:
                block._compiled_call_impl = None  # `nn.Module.compile` has no way back of its own
        self.compiled = {}

    def report(self) -> PluginReport:
        """What attention layers and linears did so far."""
        return self.handle.report()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __str__(self) -> str:
        """What was done, a line for each thing."""
        return self._told

    __repr__ = __str__


def accelerate(
    obj: object,
    *,
    compile: bool = False,  # as torch names it
    policy: str | os.PathLike[str] | Policy | None = None,
) -> Acceleration:
    """Run attention and linears of a pipeline or model on quantized kernels, for speed.

    The same as `patch(obj, linears="auto")`; with a policy that has rules for linears, those alone
    say which linears are taken. Where `patch` or `compile` was called before, both stay as they
    are but for the patch's settings.

    Args:
        obj: what `patch` takes.
        compile: compile each block of the denoisers by itself, at the next forward.
        policy: what `patch` takes.

    Returns:
        What was done: print it; `.undo()` puts everything back.

    Raises:
        PatchError: there is nothing to patch.
        ConfigError: the policy is no sound one, or one of another model.
        UsageError: another argument is out of range.

    Example:
        >>> import torch, sage_plugin
        >>> from diffusers.models.attention_processor import Attention
        >>> layer = torch.nn.ModuleDict({"attn": Attention(query_dim=8, heads=2, dim_head=4)})
        >>> with sage_plugin.accelerate(layer) as acceleration:
        ...     print(acceleration)
        model (ModuleDict): 1 attention layer on kernel 'auto'
          linears: none taken; 4 left: projections into and out of the blocks stay in 16 bit
    """
    if not isinstance(compile, bool):
        raise UsageError(
            f"compile is {compile!r}; give True or False, and call .compile() of the blocks "
            "yourself for other modes"
        )
    rules = None if policy is None else chosen_policy(policy)
    ruled = rules is not None and any(rule.op in LINEARS for rule in rules.rules)
    handle = patch(obj, policy=rules, linears=None if ruled else "auto")
    compiled = {}
    if compile:
        for name, module in handle.components.items():
            compiled[name] = _compiled(module)
    return Acceleration(handle, compiled)


def _compiled(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model that are compiled now and were not before."""
    repeated = getattr(model, "_repeated_blocks", None) or ()
    blocks = [m for m in model.modules() if type(m).__name__ in repeated]
    if not blocks:
        paths = blocks_of(model, [path for path, _, _ in attention_modules(model)])
        blocks = [model.get_submodule(path) for path in paths]
    made = [block for block in blocks if block._compiled_call_impl is None]
    for block in made:
        block.compile()
    return made


def _lines(handle: PatchHandle, compiled: dict[str, list[nn.Module]]) -> Iterator[str]:
    for part in handle._parts:
        options, name = part.state.options, part.state.component
        by = f"kernel {options.kernel!r}" if options.policy is None else "the policy's rules"
        attention = number_of(len(part.layers), "attention layer")
        yield f"{name} ({type(part.module).__name__}): {attention} on {by}"
        yield f"  linears: {_taken(part)}"
        blocks = Counter(type(block).__name__ for block in compiled.get(name, ()))
        if blocks:
            kinds = ", ".join(f"{count} {kind}" for kind, count in blocks.items())
            yield f"  compiled at the next forward: {kinds}"


def _taken(part: Component) -> str:
    """Which linears and experts of a component run on what, and why the others do not."""
    layers: list[LinearLayer | ExpertsLayer] = list(part.linears.layers.values())
    layers += part.experts.layers.values()
    kernels = Counter(x.quantized.label for x in layers if x.quantized is not None)
    told = ", ".join(f"{count} on {kernel}" for kernel, count in kernels.items()) or "none taken"
    saved = sum(layer.saved_bytes() for layer in layers)
    if saved > 0:
        told += f", {saved / MEBIBYTE:,.0f} MiB less of their device's memory"
    left = Counter(part.linears_left().values())
    why = ", ".join(f"{count} left: {reason}" for reason, count in left.items())
    return f"{told}; {why}" if why else told
