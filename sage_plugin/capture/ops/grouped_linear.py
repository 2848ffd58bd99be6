"""How calls of experts are recorded: both grouped linears of a mixture, with the real routing.

A hook before the experts, patched or not, sees tokens and where they are sent. What the second
product gets is computed for the saved rows alone, by the first in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from sage_plugin.capture.call import autocast_dtype
from sage_plugin.capture.ops.linear import (
    LinearOp,
    ModuleHook,
    hash_once,
    hooked,
    spread_rows,
    with_weight,
)
from sage_plugin.capture.ops.op import Extracted, Listener, Listening
from sage_plugin.capture.store.linear_file import GROUP_SIZES, WEIGHT_RMS
from sage_plugin.kernels.grouped_linear.call import GroupedLinearCall
from sage_plugin.kernels.grouped_linear.executor import host_grouped_linear
from sage_plugin.kernels.grouped_linear.operands import ends_of
from sage_plugin.kernels.grouped_linear.routing import Routing, routing_of
from sage_plugin.plugin.component import Component
from sage_plugin.plugin.experts.eligible import (
    activate,
    bias_of,
    find_experts,
    names_of,
    obstacle,
    weight_named,
)
from sage_plugin.plugin.experts.layer import layer_in
from sage_plugin.plugin.linears.roles import plain_path
from sage_plugin.plugin.steps.forward import Forward
from sage_plugin.schema import GROUPED_LINEAR, LinearShape


@dataclass(frozen=True, slots=True)
class ExpertsEvent:
    """One grouped linear of a call of experts, before it runs.

    Attributes:
        component: name of the component.
        layer: module path with the component in front, and the name of the weights.
        call_index: which call of the experts in the current forward, from 0.
        module: the experts.
        weights: name of the weights in the module.
        x: tokens, `(S, H)`.
        chosen: `(S, k)` experts of each.
    """

    family: ClassVar[str] = GROUPED_LINEAR

    component: str
    layer: str
    call_index: int
    module: nn.Module
    weights: str
    x: torch.Tensor
    chosen: torch.Tensor


@dataclass(frozen=True, slots=True)
class GroupedInputs:
    """The call in canonical form.

    Attributes:
        x: tokens, `(S, H)`.
        routing: how rows come from them.
        used: rows that belong to an expert that is here.
        shape: the full call.
    """

    x: torch.Tensor
    routing: Routing
    used: int
    shape: LinearShape


class GroupedLinearOp(LinearOp):
    """Grouped linears, as `capture.ops.op.CapturedOp`; rows are chosen as those of linears."""

    layers_word = "grouped linears"

    def layers(self, part: Component) -> list[str]:
        """Return the names of the experts' weights, as the model has them."""
        return [f"{name}.{own}" for name, x in _experts(part) for own in names_of(x)]

    def watch(self, part: Component, listener: Listener) -> Iterable[Listening]:
        """Hook all experts of a component."""
        return hooked(part, _experts(part), listener, _events)

    def canonical(self, event: ExpertsEvent) -> GroupedInputs | str:  # type: ignore[override]
        """Return rows and shape of a call, or the reason why it cannot be recorded."""
        x, layer = event.x, layer_in(event.module)
        if type(x) is not torch.Tensor or x.dim() != 2 or x.numel() == 0 or x.is_meta:
            return "no rows with data"
        if layer is not None and layer.freed:
            return "its original weights were freed by keep_originals=False"
        weight = weight_named(event.module, event.weights)
        groups, out_features, in_features = weight.shape
        routing = routing_of(event.chosen, groups)
        used = int(routing.group_sizes.sum())
        if used == 0:
            return "no token is sent to the experts that are here"
        dtype = str(autocast_dtype(x) or x.dtype).removeprefix("torch.")
        shape = LinearShape(
            routing.places.numel(), in_features, out_features, dtype,
            bias=bool(event.module.has_bias), groups=groups,
        )  # fmt: skip
        return GroupedInputs(x.detach(), routing, used, shape)

    def extract(  # type: ignore[override]
        self, event: ExpertsEvent, call: GroupedInputs, part: tuple[int, int], forward: Forward
    ) -> Extracted:
        """Copy evenly spread rows to host memory, and the weights where there is room for them."""
        count, room = min(part[0], call.used), part[1]
        module, routing = event.module, call.routing
        places = spread_rows(count, call.used, call.x.device)
        tokens = routing.order().index_select(0, places) // routing.places.shape[1]
        x = call.x.index_select(0, tokens).to(getattr(torch, call.shape.dtype))
        first, second = names_of(module)
        if event.weights == second:
            ends = ends_of(routing.group_sizes, call.shape.rows).long()
            group = torch.searchsorted(ends, places, right=True)
            sizes = torch.bincount(group, minlength=len(ends)).to(torch.int32)
            up, bias = weight_named(module, first).to(x.dtype), bias_of(module, first)
            with torch.no_grad():
                inner = host_grouped_linear(GroupedLinearCall(x, up, sizes, bias))
                x = activate(module, inner).to(x.dtype)
        weight = weight_named(module, event.weights)
        tensors = {
            "x": x.cpu().contiguous(),
            GROUP_SIZES: routing.group_sizes.cpu(),
            WEIGHT_RMS: torch.stack([w.float().square().mean().sqrt() for w in weight]).cpu(),
        }
        if (bias := bias_of(module, event.weights)) is not None:
            tensors["bias"] = bias.cpu().contiguous()
        digest = hash_once(module, event.weights, weight)
        key = event.layer.removeprefix(f"{event.component}.")
        return with_weight(tensors, count, key, digest, weight if weight.nbytes <= room else None)


def _events(
    hook: ModuleHook, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[ExpertsEvent]:
    given = [*args, *(kwargs[n] for n in ("hidden_states", "top_k_index") if n in kwargs)]
    if len(given) < 2 or not all(isinstance(one, torch.Tensor) for one in given[:2]):
        return
    component, number = hook.part.state.component, hook.counts.next(hook.name)
    for weights in names_of(module):
        layer = f"{hook.name}.{weights}"
        yield ExpertsEvent(component, layer, number, module, weights, given[0], given[1])


def _experts(part: Component) -> list[tuple[str, nn.Module]]:
    """Names and modules of the experts of a component that could be quantized."""
    model, component = part.module, part.state.component
    found = {} if model is None else find_experts(model)
    return [
        (f"{component}.{plain_path(path)}" if path else component, module)
        for path, module in found.items()
        if layer_in(module) is not None or obstacle(module, "auto") is None
    ]
