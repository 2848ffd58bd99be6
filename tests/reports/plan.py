"""What a call would launch and allocate: the launch code on meta tensors, without its kernels."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams
from tests.kernels.calls import launch


@dataclass
class Plan:
    """Grids, and tensors that reach kernels (inputs too, each once), of one call."""

    grids: list[tuple[int, ...]] = field(default_factory=list)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)

    def launch(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        self.grids.append(grid)
        self._note(arguments)

    def _note(self, arguments: tuple[Any, ...]) -> None:
        for x in arguments:
            if isinstance(x, tuple):
                self._note(x)
            elif isinstance(x, torch.Tensor):
                self.tensors[x.untyped_storage()._cdata] = x


class _Recorder:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __getitem__(self, grid):
        return lambda *arguments, **named: self.plan.launch(grid, (*arguments, *named.values()))


def plan(
    monkeypatch, kernel: str, q, k, v, *, problem: AttentionParams | None = None, **fields
) -> Plan:
    """The plan of a call on meta tensors."""
    from triton.runtime.jit import KernelInterface

    made = Plan()
    built = implementation(kernel, "portable")
    loaded = [m for n, m in list(sys.modules.items()) if n.startswith("sage_plugin.kernels")]
    for module in loaded:
        for name, value in list(vars(module).items()):
            if isinstance(value, KernelInterface):
                monkeypatch.setattr(module, name, _Recorder(made))
    problem = problem or AttentionParams(q.shape[-1] ** -0.5, False, "bhsd")
    operands = built.prepare(q, k, v, problem=problem, launch=launch(**fields))
    built.launch(operands, return_lse=True)
    return made
