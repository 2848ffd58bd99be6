"""Which linears of a model are taken, and why each of the others is left as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.plugin.context import layer_path
from sage_plugin.plugin.hosts.tensor_parallel import (
    shard_of,
    sharding_of,
    transforms_of,
)
from sage_plugin.plugin.linears.module import QuantizedLinear
from sage_plugin.plugin.linears.roles import BASE_LAYER, Role, blocks_of, role_of

QUANTIZERS = ("bitsandbytes", "torchao", "gguf", "quanto", "hqq", "awq", "gptq", "fp8", "eetq")
"""Words in the module of a class by which a quantized linear is known."""
GROUP_OFFLOADING = "group_offloading"


@dataclass(frozen=True, slots=True, eq=False)
class FoundLinear:
    """A linear of a model.

    Attributes:
        module: the linear itself.
        role: what it is for.
        reason: why it is left alone, `None` where it is taken.
    """

    module: nn.Module
    role: Role
    reason: FallbackReason | None


def find_linears(model: nn.Module, attention: Iterable[str]) -> dict[str, FoundLinear]:
    """All linears of a model by path, but for those inside adapters.

    Args:
        model: the model.
        attention: paths of its attention modules, by which its blocks are known.
    """
    attention = list(attention)
    blocks, shared = blocks_of(model, attention), _Shared(model)
    offloaded = [path for path, module in model.named_modules() if _offloads(module)]
    found = {}
    for path, module in _linears(model):
        role = role_of(path, model=type(model).__name__, blocks=blocks, attention=attention)
        reason = _obstacle(module)
        if not role.quantized:
            reason = FallbackReason(Fallback.LINEAR_ROLE, role.value)
        elif any(_lies_in(path, place) for place in offloaded):
            reason = FallbackReason(Fallback.LINEAR_OFFLOADED, "diffusers' group offload")
        elif reason is None and shared.has(module):
            reason = FallbackReason(Fallback.LINEAR_TIED)
        found[layer_path(path)] = FoundLinear(module, role, reason)
    return found


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Paths and linears, of adapters around a linear only the linear itself."""
    adapters: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(prefix) for prefix in adapters):
            if not path.endswith(f".{BASE_LAYER}"):
                continue
        elif BASE_LAYER in module._modules:
            adapters.append(f"{path}.")
            continue
        if isinstance(module, nn.Linear) or _quantized_by(module):
            yield path, module


def _obstacle(module: nn.Module) -> FallbackReason | None:
    """Why a linear itself cannot be taken."""
    name = type(module).__name__
    if _quantized_by(module):
        return FallbackReason(Fallback.LINEAR_QUANTIZED, name)
    if type(module) not in (nn.Linear, QuantizedLinear):
        return FallbackReason(Fallback.LINEAR_CLASS, name)
    transformed = transforms_of(module) is not None
    if "forward" in vars(module) and not transformed:
        if hasattr(module, "_hf_hook"):
            return FallbackReason(Fallback.LINEAR_OFFLOADED, "a hook of accelerate")
        return FallbackReason(Fallback.LINEAR_FORWARD)
    weight = module._parameters.get("weight")
    if weight is None:
        return FallbackReason(Fallback.LINEAR_CLASS, f"{name} without a weight")
    own = shard_of(weight) if transformed or sharding_of(module) is not None else weight
    kind = type(own) if type(own) is not nn.Parameter else type(own.data)
    if kind is not torch.Tensor:
        if kind.__module__.startswith("torchao"):
            return FallbackReason(Fallback.LINEAR_QUANTIZED, kind.__name__)
        return FallbackReason(Fallback.LINEAR_WEIGHT, kind.__name__)
    if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return FallbackReason(Fallback.DTYPE, str(weight.dtype))
    if weight.device.type == "meta" and type(module) is nn.Linear:
        return FallbackReason(Fallback.LINEAR_OFFLOADED, "a device map")
    if weight.grad is not None:
        return FallbackReason(Fallback.GRADIENT)
    return None


def _quantized_by(module: nn.Module) -> bool:
    """Whether a module is a linear that another library has quantized."""
    kind = type(module)
    return kind.__name__.lower().endswith(("linear", "linear4bit", "linear8bitlt")) and any(
        word in kind.__module__.lower() for word in QUANTIZERS
    )


def _offloads(module: nn.Module) -> bool:
    """Whether diffusers moves the weights below a module whenever it is called."""
    registry = getattr(module, "_diffusers_hook", None)
    return registry is not None and registry.get_hook(GROUP_OFFLOADING) is not None


def _lies_in(path: str, place: str) -> bool:
    return not place or path == place or path.startswith(f"{place}.")


class _Shared:
    """Which weights of a model are, in part or whole, those of something else in it too."""

    def __init__(self, model: nn.Module) -> None:
        owners = Counter(
            id(tensor)
            for module in model.modules()
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        )
        self._twice = {key for key, count in owners.items() if count > 1}
        spans = sorted(span for p in (*model.parameters(), *model.buffers()) if (span := _span(p)))
        self._overlapping: set[int] = set()
        end, last = 0, 0
        for start, stop, key in spans:
            if start < end:
                self._overlapping |= {key, last}
            if stop > end:
                end, last = stop, key

    def has(self, linear: nn.Module) -> bool:
        """Whether the weight of a linear is shared."""
        key = id(linear._parameters["weight"])
        return key in self._twice or key in self._overlapping


def _span(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Where a dense tensor lies in memory; device memory and that of the host do not overlap.

    No operation runs on it: a `DTensor` allows none while its shard waits on another device.
    """
    own = shard_of(tensor)
    if type(own) not in (torch.Tensor, nn.Parameter) or own.layout != torch.strided:
        return None
    if own.device.type == "meta" or own.numel() == 0:
        return None
    start = own.data_ptr()
    return start, start + own.nbytes, id(tensor)
