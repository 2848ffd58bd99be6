"""Which modules are the experts of a mixture, and why some run as ever.

Those are known by what transformers' decorator of experts gives them: weights of all experts in one
tensor, and how they are laid out. Nothing of transformers is imported here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.kernels.grouped_linear.experts import Experts
from sage_plugin.kernels.grouped_linear.weight import quantize_weights
from sage_plugin.plugin.context import layer_path
from sage_plugin.plugin.hosts.tensor_parallel import shard_of, transforms_of

FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
DEFAULT_GATE = "_default_apply_gate"
ACTIVATIONS = ("SiLU", "SiLUActivation")
"""Classes of the activation that is computed in the pass that quantizes."""


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """All modules of experts in a model, by path."""
    return {layer_path(path): x for path, x in model.named_modules() if is_experts(x)}


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is the experts of a mixture.

    Example:
        >>> is_experts(nn.Linear(2, 2))
        False
    """
    flagged = all(hasattr(module, flag) for flag in FLAGS)
    return flagged and all(hasattr(module, name) for name in names_of(module))


def names_of(module: nn.Module) -> tuple[str, str]:
    """Return the names of the weights of the first product and of the second."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def weights_of(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of the first product and of the second, as the module has them.

    Of tensor parallel ones the parts that this process has.
    """
    up, down = (shard_of(getattr(module, name)) for name in names_of(module))
    return up, down


def weight_named(module: nn.Module, name: str) -> torch.Tensor:
    """Return weights as `(E, N, K)`, however the module has them."""
    weight = shard_of(getattr(module, name)).detach()
    return weight.transpose(1, 2) if module.is_transposed else weight


def bias_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the `(E, N)` bias of weights, `None` for none."""
    return getattr(module, f"{name}_bias").detach() if module.has_bias else None


def activate(module: nn.Module, inner: torch.Tensor) -> torch.Tensor:
    """Return what the second product gets of what the first gave, as the module makes it."""
    make: Any = module._apply_gate if module.has_gate else module.act_fn
    made: torch.Tensor = make(inner)
    return made


def obstacle(module: nn.Module, kernel: str) -> FallbackReason | None:
    """Why experts run as ever, `None` where they do not.

    Args:
        module: the experts.
        kernel: kernel by name, or `"auto"`.
    """
    name = type(module).__name__
    if kernel == "fp8_tensor":
        return FallbackReason(Fallback.EXPERTS_KERNEL, kernel)
    if getattr(module, "has_post_expert_norm", False):
        return FallbackReason(Fallback.EXPERTS_NORM)
    sharded = transforms_of(module) is not None and not module.has_bias
    if "forward" in vars(module) and not sharded:
        hooked = hasattr(module, "_hf_hook")
        hook = FallbackReason(Fallback.LINEAR_OFFLOADED, "a hook of accelerate")
        return hook if hooked else FallbackReason(Fallback.LINEAR_FORWARD)
    if hasattr(module, f"{names_of(module)[0]}_scale_inv"):
        return FallbackReason(Fallback.LINEAR_QUANTIZED, name)
    for own in names_of(module):
        weight = shard_of(getattr(module, own)) if sharded else getattr(module, own)
        kind = type(weight) if type(weight) is not nn.Parameter else type(weight.data)
        if kind is not torch.Tensor or weight.dim() != 3:
            return FallbackReason(Fallback.LINEAR_WEIGHT, kind.__name__)
        if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return FallbackReason(Fallback.DTYPE, str(weight.dtype).removeprefix("torch."))
        if weight.device.type == "meta":
            return FallbackReason(Fallback.LINEAR_OFFLOADED, "a device map")
    return None


def quantized_experts(module: nn.Module, kernel: str) -> Experts:
    """Quantize the weights of experts.

    Args:
        module: the experts.
        kernel: a quantized kernel.
    """
    names = names_of(module)
    up, down = (quantize_weights(weight_named(module, name), kernel) for name in names)
    up_bias, down_bias = (bias_of(module, name) for name in names)
    between = None if _is_swiglu(module) else functools.partial(activate, module)
    return Experts(up, down, up_bias, down_bias, between=between)


def _is_swiglu(module: nn.Module) -> bool:
    """Whether experts weigh half of their channels by `silu` of the other half."""
    gate = getattr(type(module), "_apply_gate", None)
    return bool(
        module.has_gate
        and module.is_concatenated
        and getattr(gate, "__name__", "") == DEFAULT_GATE
        and type(module.act_fn).__name__ in ACTIVATIONS
    )
