"""Tensor parallel linears: what is done around them, and the shard of a process.

Their `weight` is a `DTensor`, and a patched one quantizes the shard of its process: some of the
outputs of a column-parallel linear, some of the inputs of a row-parallel one, which so multiplies
before its sum over processes.

With `tp_plan="auto"` transformers puts a function in place of `forward` that shards the input,
calls the forward of the linear's class on plain tensors, and joins the outputs. Torch's
`parallelize_module`, which diffusers uses, leaves that to hooks: forward gets and gives `DTensor`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from sage_plugin.plugin.hosts.parallel import arrived

INSTALLED = "TensorParallelLayer.install_forward.<locals>.tp_forward"
"""What the function is called that transformers puts in place of a linear's `forward`."""
PACKAGE = "transformers."
FORWARD = "forward"
DISTRIBUTED = "_distribute_module_applied"
"""What torch marks a module with whose parameters it made `DTensor`s."""


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


class Sharding(NamedTuple):
    """How torch's `parallelize_module` shards a linear.

    Attributes:
        mesh: the processes that have a shard each.
        by_rows: whether inputs are sharded, and outputs of processes are to be summed.
        adds_bias: whether this process adds the bias: of those that are summed the first one.
    """

    mesh: Any
    by_rows: bool
    adds_bias: bool

    def own(self, x: torch.Tensor) -> torch.Tensor | None:
        """This process's part of an input; `None` of one that is sharded otherwise."""
        placements: Sequence[Any] = getattr(x, "placements", ())
        if len(placements) != 1:
            return None
        fits = placements[0].is_shard(x.dim() - 1) if self.by_rows else placements[0].is_replicate()
        if not fits:
            return None
        part: torch.Tensor = x.to_local()  # type: ignore[attr-defined]
        return part if torch.compiler.is_compiling() else arrived(part)

    def bias(self, module: nn.Linear) -> torch.Tensor | None:
        """This process's part of the bias."""
        return shard_of(module.bias) if self.adds_bias and module.bias is not None else None

    def joined(self, out: torch.Tensor) -> torch.Tensor:
        """The output of all processes."""
        from torch.distributed.tensor import DTensor, Partial, Shard

        placement = Partial() if self.by_rows else Shard(out.dim() - 1)
        return DTensor.from_local(out, self.mesh, [placement], run_check=False)


def sharding_of(module: nn.Module) -> Sharding | None:
    """How torch shards a linear, evenly over one dimension of processes; `None` if it does not."""
    weight = module._parameters.get("weight")
    mesh = getattr(weight, "device_mesh", None)
    placements: Sequence[Any] = getattr(weight, "placements", ())
    if weight is None or mesh is None or not getattr(module, DISTRIBUTED, False):
        return None
    dim = placements[0].dim if len(placements) == 1 and placements[0].is_shard() else None
    if dim is None or weight.shape[dim] % mesh.size():
        return None
    return Sharding(mesh, dim == 1, dim == 0 or mesh.get_local_rank() == 0)


def shard_of(weight: torch.Tensor) -> torch.Tensor:
    """The part of a weight that this process has: of a plain tensor, all of it.

    Example:
        >>> shard_of(torch.ones(2))
        tensor([1., 1.])
    """
    shard: torch.Tensor = getattr(weight, "_local_tensor", weight)
    return shard
