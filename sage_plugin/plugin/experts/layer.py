"""The experts of one mixture as they are patched: 8-bit weights, and what their calls did."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sage_plugin.errors import PatchError, UnsupportedInputError
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.kernels.grouped_linear.executor import GroupedExecutor
from sage_plugin.kernels.grouped_linear.experts import Experts, run_experts
from sage_plugin.kernels.notice import warn_once
from sage_plugin.kernels.surroundings import wants_gradient
from sage_plugin.plugin.context import PatchState
from sage_plugin.plugin.counts import LayerCounts
from sage_plugin.plugin.experts.eligible import (
    names_of,
    obstacle,
    quantized_experts,
    weights_of,
)
from sage_plugin.plugin.hosts.tensor_parallel import Transforms
from sage_plugin.plugin.linears.compute import count_config, kernel_for
from sage_plugin.plugin.linears.roles import Role

logger = logging.getLogger(__name__)

SLOT = "_sage_experts"
"""Where a module of experts has its `ExpertsLayer`."""

Stock = Callable[..., torch.Tensor]


@dataclass(eq=False)  # no slots: traced code reads it
class ExpertsLayer:
    """The experts of a mixture; the original weights stay where they are, unless they are freed.

    Traced code reads `quantized` and the options alone.

    Attributes:
        name: module path with the component in front.
        state: what it shares with the other layers of the component.
        kernel: kernel by name, or `"auto"`.
        rule: number of the policy's rule that chose the kernel, 0 where none did.
        keep: whether the originals are kept.
        quantized: the 8-bit weights, `None` where no kernel runs them.
        left: why it runs as ever, `None` where it does not.
        freed: whether there are no originals any more.
        counts: what it did since the last `patch`.
        role: what its weights are for.
        transforms: what tensor parallelism does around its forward; the weights are then the parts
            that this process has, and are kept.
    """

    name: str
    state: PatchState
    kernel: str
    rule: int = 0
    keep: bool = True
    quantized: Experts | None = None
    left: FallbackReason | None = None
    freed: bool = False
    counts: LayerCounts = field(default_factory=LayerCounts)
    role: Role = Role.EXPERTS
    transforms: Transforms | None = None
    _known: tuple[object, ...] = ()
    _original_bytes: int = 0

    def run(
        self,
        module: nn.Module,
        stock: Stock,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Send tokens through their experts, on a kernel or as ever.

        Args:
            module: the experts.
            stock: runs them as ever.
            x: `(S, H)`.
            chosen: `(S, k)` experts of each token.
            weights: `(S, k)` of the sum.
        """
        if torch.compiler.is_compiling():
            if self.quantized is None or _wants_gradient(module, x, weights):
                return stock(x, chosen, weights)
            return run_experts(x, chosen, weights, self.quantized, self.state.options.of_linears)
        if self.quantized is None and self.left is None:
            self.settle(module)
        reason = self._obstacle(module, x, weights)
        if reason is not None:
            self._count_fallback(reason)
            return stock(x, chosen, weights)
        assert self.quantized is not None
        ran: list[GroupedExecutor] = []
        request = self.state.options.of_linears
        out = run_experts(x, chosen, weights, self.quantized, request, ran)
        label = ran[0].decision.label if ran else f"{self.quantized.kernel}:traced"
        self.counts.calls[label] += 1
        for executor in ran:
            count_config(self.counts, executor.found)
        if self.rule:
            self.counts.rules[self.rule] += 1
        return out

    def settle(self, module: nn.Module) -> None:
        """Quantize the weights as they are now, unless they are known, or no kernel takes them."""
        if self.freed:
            return
        up, down = weights_of(module)
        now = (self.kernel, *(v for w in (up, down) for v in (w._version, w.data_ptr(), w.device)))
        if now == self._known:
            return
        self._known, self.quantized, self.left = now, None, obstacle(module, self.kernel)
        if self.left is not None:
            return
        kernel = kernel_for(up.flatten(0, 1), self.kernel)
        if isinstance(kernel, FallbackReason):
            self.left = kernel
            return
        self.quantized = quantized_experts(module, kernel)
        if not self.keep and self.transforms is None:
            self._original_bytes, self.freed = up.nbytes + down.nbytes, True
            for name, weight in zip(names_of(module), (up, down), strict=True):
                empty = torch.empty_like(weight, device="meta")
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)

    def distrust(self) -> None:
        """Quantize the weights anew at the next chance: they may have been written unseen."""
        self._known = ()

    def check_original(self) -> None:
        """Raise unless there are originals.

        Raises:
            PatchError: they were freed.
        """
        if self.freed:
            raise PatchError(
                f"{self.name}: its original weights were freed by keep_originals=False, so that "
                "they can be neither read, saved, copied nor put back; load the model again"
            )

    def saved_bytes(self) -> int:
        """Memory that the weights take less on their device; negative beside the originals."""
        return self._original_bytes - (0 if self.quantized is None else self.quantized.nbytes)

    def _obstacle(
        self, module: nn.Module, x: torch.Tensor, weights: torch.Tensor
    ) -> FallbackReason | None:
        if self.left is not None:
            return self.left
        if self.state.disabled:
            return FallbackReason(Fallback.DISABLED)
        if self.quantized is None or x.device != self.quantized.up.data.device:
            return FallbackReason(Fallback.LINEAR_DEVICE)
        if _wants_gradient(module, x, weights):
            return FallbackReason(Fallback.GRADIENT)
        return FallbackReason(Fallback.EMPTY) if x.numel() == 0 else None

    def _count_fallback(self, reason: FallbackReason) -> None:
        """Enter a call that runs as ever.

        Raises:
            UnsupportedInputError: strict mode, and nobody asked for it.
            PatchError: there are no originals.
        """
        self.counts.fallbacks[reason] += 1
        self.check_original()
        if not (reason.cause.asked_for or reason.cause is Fallback.LINEAR_ON_CPU):
            told = f"{self.name}: {reason}; its experts run with their original weights"
            if self.state.options.strict:
                raise UnsupportedInputError(f"{told} unless on_unsupported='error' forbids it")
            warn_once(logger, ("experts", reason), "%s (said once)", told)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of patched experts has no layer."""
        return type(None), ()


def layer_in(module: nn.Module) -> Any:  # noqa: ANN401
    """Return the layer that a module of experts has, `None` for none."""
    return vars(module).get(SLOT)


def _wants_gradient(module: nn.Module, *inputs: torch.Tensor) -> bool:
    weights = (module._parameters[name] for name in names_of(module))
    return wants_gradient(*inputs, *weights)
