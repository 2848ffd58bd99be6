"""Tensor parallel linears of transformers: the transforms around them, and the shard of a process.

With `tp_plan="auto"` a linear's `weight` is a `DTensor`, and its `forward` a function that shards
the input, calls the forward of the linear's class on this process's shard, and joins the outputs:
it gathers those of a column-parallel linear, or leaves them to the next one, and sums those of a
row-parallel one. A patched linear quantizes its shard, and so multiplies before the sum.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

INSTALLED = "TensorParallelLayer.install_forward.<locals>.tp_forward"
"""What the function is called that transformers puts in place of a linear's `forward`."""
PACKAGE = "transformers."
FORWARD = "forward"


class Transforms(NamedTuple):
    """What transformers does around the forward of a parallel linear.

    Attributes:
        style: a `TensorParallelLayer`.
        mesh: the processes that have a shard each.
        forward: the function that does it.
    """

    style: Any
    mesh: Any
    forward: FunctionType

    def install(self, module: nn.Module) -> None:
        """Put them around the forward of the class that a linear has now."""
        vars(module).pop(FORWARD, None)
        self.style.install_forward(module, self.mesh)

    def put_back(self, module: nn.Module) -> None:
        """Give a linear the function that it had, unless somebody gave it another one since."""
        if transforms_of(module) is not None:
            vars(module)[FORWARD] = self.forward


def transforms_of(module: nn.Module) -> Transforms | None:
    """The transforms around a linear that computes on plain tensors without a gradient, or `None`.

    Args:
        module: any module.
    """
    forward = vars(module).get(FORWARD)
    if not isinstance(forward, FunctionType) or forward.__qualname__ != INSTALLED:
        return None
    if not forward.__module__.startswith(PACKAGE) or forward.__closure__ is None:
        return None
    names = forward.__code__.co_freevars
    known = {n: c.cell_contents for n, c in zip(names, forward.__closure__, strict=True)}
    inner = known.get("original_forward")
    own = getattr(inner, "__func__", None) is type(module).forward
    bound = known.get("module") is module is getattr(inner, "__self__", None)
    if not own or not bound:
        return None
    found = Transforms(known["self"], known["mesh"], forward)
    with torch.no_grad():
        return found if found.style.should_use_local_tensors(module) else None


def shard_of(weight: torch.Tensor) -> torch.Tensor:
    """The part of a weight that this process has: of a plain tensor, all of it.

    Example:
        >>> shard_of(torch.ones(2))
        tensor([1., 1.])
    """
    shard: torch.Tensor = getattr(weight, "_local_tensor", weight)
    return shard
