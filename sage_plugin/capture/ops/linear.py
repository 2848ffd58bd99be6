"""How calls of linears are recorded: a hook on each linear that could be quantized.

It runs before the linear, patched or not, and sees what a patched one would fuse into one pass as
the tensor that it stands for. The weight is told by reference: the name that it has in the model's
own files, and its checksum.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from sage_plugin.capture.call import autocast_dtype
from sage_plugin.capture.ops.op import Extracted, Listener, Listening
from sage_plugin.capture.record import LinearCapture
from sage_plugin.capture.selection.options import CaptureOptions
from sage_plugin.capture.store.linear_file import weight_hash
from sage_plugin.capture.store.paths import weight_name
from sage_plugin.plugin.component import Component, component_of
from sage_plugin.plugin.hosts.diffusers import attention_modules
from sage_plugin.plugin.linears.eligible import find_linears
from sage_plugin.plugin.linears.layer import SLOT, LinearLayer
from sage_plugin.plugin.linears.pending import PendingNorm
from sage_plugin.plugin.linears.roles import plain_path
from sage_plugin.plugin.steps.forward import Forward
from sage_plugin.schema import LINEAR, LinearShape

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_hashes: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[tuple[int, int], str]]]
_hashes = weakref.WeakKeyDictionary()
"""Checksums of weights, as long as they are the same tensor and nobody writes it."""


@dataclass(frozen=True, slots=True)
class LinearEvent:
    """One call of a linear, before it runs.

    Attributes:
        component: name of the component.
        layer: module path, with the component in front and without what adapters add.
        call_index: which call of the linear in the current forward, from 0.
        module: the linear.
        x: its input, `(..., K)`.
    """

    family: ClassVar[str] = LINEAR

    component: str
    layer: str
    call_index: int
    module: nn.Module
    x: torch.Tensor


@dataclass(frozen=True, slots=True)
class LinearInputs:
    """The call in canonical form.

    Attributes:
        x: `(..., K)`, of M rows.
        shape: the full call.
    """

    x: torch.Tensor
    shape: LinearShape


@dataclass(frozen=True, slots=True)
class RowRule:
    """How to choose the rows of a call that are saved.

    Attributes:
        cap_bytes: limit of one capture, its weight included where that fits.
        rows: most rows.
    """

    cap_bytes: int
    rows: int

    def choose(self, call: LinearInputs) -> tuple[int, int] | str:
        """Return how many rows are saved and what is left for the weight, or why none can be."""
        each = call.shape.in_features * getattr(torch, call.shape.dtype).itemsize
        count = min(call.shape.rows, self.rows, self.cap_bytes // each)
        if count == 0:
            return f"larger than the {self.cap_bytes} bytes that the budget leaves for one capture"
        return count, self.cap_bytes - count * each


class LinearOp:
    """Linears, as `capture.ops.op.CapturedOp`."""

    record = LinearCapture
    layers_word = "linears"
    short = "rows"

    def layers(self, part: Component) -> list[str]:
        """Return the names of the linears that could be quantized, as rules name them."""
        return [name for name, _ in _linears(part)]

    def watch(self, part: Component, listener: Listener) -> Iterable[Listening]:
        """Hook every linear of a component."""
        return hooked(part, _linears(part), listener, _events)

    def canonical(self, event: LinearEvent) -> LinearInputs | str:
        """Return rows and shape of a call, or the reason why it cannot be recorded."""
        x, module = event.x, event.module
        layer: LinearLayer | None = vars(module).get(SLOT)
        if type(x) not in (torch.Tensor, nn.Parameter):
            return "tensor subclass"
        if x.dim() == 0 or x.numel() == 0 or x.device.type == "meta":
            return "no rows with data"
        dtype = autocast_dtype(x) or x.dtype
        if dtype not in _DTYPES:
            return f"an input of {str(dtype).removeprefix('torch.')}"
        if layer is not None and layer.freed:
            return "its original weight was freed by keep_originals=False"
        weight = module._parameters["weight"]
        assert weight is not None, "the linear can be quantized"
        shape = LinearShape(
            x.numel() // x.shape[-1], weight.shape[1], weight.shape[0],
            str(dtype).removeprefix("torch."),
            bias=module._parameters.get("bias") is not None,
        )  # fmt: skip
        return LinearInputs(x.detach(), shape)

    def length(self, call: LinearInputs) -> int:
        """Return the rows."""
        return call.shape.rows

    def counted(self, call: LinearInputs) -> LinearShape:
        """Return its shape."""
        return call.shape

    def chooser(self, options: CaptureOptions) -> Callable[[LinearInputs], tuple[int, int] | str]:
        """Return what chooses rows."""
        return RowRule(options.share, options.rows).choose

    def extract(
        self, event: LinearEvent, call: LinearInputs, part: tuple[int, int], forward: Forward
    ) -> Extracted:
        """Copy evenly spread rows to host memory, and the weight where there is room for it."""
        count, room = part
        total = call.shape.rows
        rows = spread_rows(count, total, call.x.device)
        dtype = getattr(torch, call.shape.dtype)
        x = call.x.reshape(-1, call.x.shape[-1]).index_select(0, rows)
        tensors = {"x": x.to(dtype).cpu()}
        bias = event.module._parameters.get("bias")
        if bias is not None:
            tensors["bias"] = bias.detach().cpu().contiguous()
        weight = _original(event.module)
        digest = hash_once(event.module, "weight", weight)
        key = f"{event.layer.removeprefix(f'{event.component}.')}.weight"
        return with_weight(tensors, count, key, digest, weight if weight.nbytes <= room else None)


def spread_rows(count: int, total: int, device: torch.device) -> torch.Tensor:
    """Return the numbers of evenly spread rows: the middle of each of `count` parts.

    Example:
        >>> spread_rows(2, 8, torch.device("cpu"))
        tensor([2, 6])
    """
    return (2 * torch.arange(count, device=device) + 1) * total // (2 * count)


def with_weight(
    tensors: dict[str, torch.Tensor], rows: int, key: str, digest: str, weight: torch.Tensor | None
) -> Extracted:
    """Return what is saved of a linear: rows, and its weight where there is room for it.

    Args:
        tensors: of the call.
        rows: how many rows they have.
        key: the weight's name in the model.
        digest: its checksum.
        weight: the weight, `None` where there is no room.
    """
    fields = {
        "rows": rows,
        "weight_key": key,
        "weight_sha256": digest,
        "weight_file": "" if weight is None else weight_name(digest),
    }
    return Extracted(
        tensors, fields, None if weight is None else weight.detach().cpu().contiguous()
    )


class CallNumbers:
    """The calls of each linear in the current forward of a component."""

    def __init__(self, part: Component) -> None:
        self._part = part
        self._forward = -1
        self._calls: Counter[str] = Counter()

    def next(self, name: str) -> int:
        """Number a call of a linear."""
        forward = self._part.state.forwards.count
        if forward != self._forward:
            self._forward = forward
            self._calls.clear()
        self._calls[name] += 1
        return self._calls[name] - 1


@dataclass(frozen=True, slots=True, eq=False)
class ModuleHook:
    """The pre-hook of one module, which tells a listener of its calls.

    Attributes:
        part: its component.
        name: what its calls are named.
        counts: numbers them.
        listener: gets the events.
        events: makes those of a call: the hook, the module, and what the call was given.
    """

    part: Component
    name: str
    counts: CallNumbers
    listener: Listener
    events: Callable[[ModuleHook, nn.Module, tuple[Any, ...], dict[str, Any]], Iterable[Any]]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell of a call, unless its component was patched anew or a compiler traces."""
        model = None if torch.compiler.is_compiling() else self.part.module
        if model is None or component_of(model) is not self.part:
            return
        for event in self.events(self, module, args, kwargs):
            self.listener(event)

    def __reduce__(self) -> tuple[type[NoHook], tuple[()]]:
        """A copy of a watched model is not watched."""
        return NoHook, ()


def hooked(
    part: Component,
    modules: Iterable[tuple[str, nn.Module]],
    listener: Listener,
    events: Any,  # noqa: ANN401
) -> list[Listening]:
    """Hook modules of a component by their names; `events` as of `ModuleHook`."""
    counts = CallNumbers(part)
    return [
        module.register_forward_pre_hook(
            ModuleHook(part, name, counts, listener, events), with_kwargs=True
        )
        for name, module in modules
    ]


def _events(
    hook: ModuleHook, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[LinearEvent]:
    x = args[0] if args else kwargs.get("input", kwargs.get("x"))
    if type(x) is PendingNorm:
        layer: LinearLayer | None = vars(module).get(SLOT)
        x = x.tensor(None if layer is None else layer.quantized)
    if isinstance(x, torch.Tensor):
        number = hook.counts.next(hook.name)
        yield LinearEvent(hook.part.state.component, hook.name, number, module, x)


class NoHook:
    """What a copy of a watched linear has instead."""

    def __call__(self, module: nn.Module, args: object, kwargs: object) -> None:
        """Do nothing."""


def _linears(part: Component) -> list[tuple[str, nn.Module]]:
    """Names and modules of the linears of a component that could be quantized."""
    model = part.module
    if model is None:
        return []
    found = find_linears(model, [path for path, _, _ in attention_modules(model)])
    component = part.state.component
    return [
        (f"{component}.{plain_path(path)}" if path else component, one.module)
        for path, one in found.items()
        if one.reason is None
    ]


def _original(module: nn.Module) -> torch.Tensor:
    """The weight as it is unpatched; a patched linear stays as it is."""
    layer: LinearLayer | None = vars(module).get(SLOT)
    own = module._parameters if layer is None else layer.original_parameters(module)
    weight = own["weight"]
    assert weight is not None, "the linear can be quantized"
    return weight


def hash_once(module: nn.Module, name: str, weight: torch.Tensor) -> str:
    """Return the checksum of a module's weight, anew where that was written or replaced.

    Args:
        module: what has it.
        name: its name there.
        weight: the weight as it is unpatched.
    """
    held = module._parameters[name]
    at = (id(held), held._version if held is not None else 0)
    of_module = _hashes.setdefault(module, {})
    known = of_module.get(name)
    if known is None or known[0] != at:
        known = of_module[name] = (at, weight_hash(weight))
    return known[1]
