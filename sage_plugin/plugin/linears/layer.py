"""One patched linear: its 8-bit weight, its original that waits in CPU memory, and its calls."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.functional import linear

from sage_plugin.errors import PatchError, UnsupportedInputError
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.kernels.linear.rows.prologue import Prologue
from sage_plugin.kernels.linear.weight import QuantizedWeight
from sage_plugin.kernels.notice import warn_once
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.plugin.context import PatchState
from sage_plugin.plugin.counts import LayerCounts
from sage_plugin.plugin.hosts.parallel import arrived
from sage_plugin.plugin.hosts.tensor_parallel import Sharding, Transforms, shard_of, sharding_of
from sage_plugin.plugin.linears import compute
from sage_plugin.plugin.linears.pending import PendingNorm
from sage_plugin.plugin.linears.roles import Role

logger = logging.getLogger(__name__)

_lock = threading.RLock()
"""Held while a weight is quantized and sent away."""

SLOT = "_sage_linear"
"""Where a linear has its `LinearLayer`."""
READ = FallbackReason(Fallback.LINEAR_READ)
GRADIENT = FallbackReason(Fallback.GRADIENT)
SUBCLASS = FallbackReason(Fallback.TENSOR_SUBCLASS)
WITHOUT_WEIGHT = FallbackReason(Fallback.LINEAR_CLASS, "a linear whose weight is computed")
"""By a parametrization or a pruning that came while it was patched."""
MOST_READS = 2
"""Forwards that need an original, before the linear is left alone."""


@dataclass(eq=False)  # no slots: traced code reads it
class LinearLayer:
    """A linear as it is patched.

    Traced code reads `quantized`, `ready`, `waiting` and `sharding` alone, so that equal blocks
    share a graph.

    Attributes:
        name: module path with the component in front.
        role: what it is for.
        state: what it shares with the other layers of the component.
        kernel: kernel by name, or `"auto"`.
        rule: number of the policy's rule that chose the kernel, 0 where none did.
        keep: whether the original is kept.
        rotation: most input channels of a block that is rotated, 0 for none.
        smooth: what its input channels are divided by, `None` for none.
        quantized: the 8-bit weight; `None` where a kernel has not run yet, and once somebody read
            the original, which may have been written since.
        ready: whether a kernel runs `quantized` where it is.
        waiting: whether the original is elsewhere than the linear.
        freed: whether there is no original any more.
        sharding: how torch shards it over processes, `None` where it does not.
        left: why it runs as ever, `None` where it does not.
        counts: what it did since the last `patch`.
    """

    name: str
    role: Role
    state: PatchState
    kernel: str
    rule: int
    keep: bool
    rotation: int = 0
    smooth: torch.Tensor | None = None
    quantized: QuantizedWeight | None = None
    ready: bool = False
    waiting: bool = False
    freed: bool = False
    sharding: Sharding | None = None
    left: FallbackReason | None = None
    counts: LayerCounts = field(default_factory=LayerCounts)
    _module: weakref.ref[nn.Module] | None = None
    _transforms: Transforms | None = None
    _version: int = 0
    _dtype: torch.dtype | None = None
    _needed: FallbackReason | None = None
    _reads: int = 0

    @property
    def module(self) -> nn.Module | None:
        """The linear, `None` when it is gone."""
        return None if self._module is None else self._module()

    @property
    def _request(self) -> BackendRequest:
        return self.state.options.of_linears

    # What forwards do.

    def trace(self, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """A call in a graph, in plain torch operations."""
        weight = module._parameters.get("weight")
        quantized, sharding = self.quantized, self.sharding
        own = x if sharding is None else sharding.own(x)
        blocked = quantized is None or not self.ready or own is None
        if not blocked and not compute.wants_gradient(x, weight, module.bias):
            request = self._request
            if sharding is None:
                return compute.traced(x, quantized, module.bias, request)  # type: ignore[arg-type]
            return sharding.joined(compute.traced(own, quantized, sharding.bias(module), request))  # type: ignore[arg-type]
        if self.waiting or self.freed:
            raise RuntimeError(
                "a graph needs the original weight of a patched linear, which waits in CPU memory "
                "or was freed: run it under torch.no_grad(), or call sage_plugin.unpatch() first"
            )
        return linear(x, module.weight if weight is None else weight, module.bias)

    def run(self, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """A call in eager mode."""
        if not self.ready and self.left is None:
            self.settle(module)
        if type(x) is PendingNorm:
            x = x.tensor(self.quantized)
        elif type(x) is not torch.Tensor:
            x = arrived(x)
        sharding = self.sharding
        own = x if sharding is None else sharding.own(x)
        reason = SUBCLASS if own is None else self._obstacle(module, own)
        if reason is None:
            assert own is not None
            assert self.quantized is not None
            bias = module.bias if sharding is None else sharding.bias(module)
            answer = compute.run(own, self.quantized, bias, self._request)
            if not isinstance(answer, FallbackReason):
                answer.count(self.counts, self.rule)
                return answer.out if sharding is None else sharding.joined(answer.out)
            reason = answer
        return self._as_ever(module, x, reason)

    def run_fused(
        self, module: nn.Linear, x: torch.Tensor, prologue: Prologue
    ) -> torch.Tensor | None:
        """A call on what a prologue makes of `x`; `None` where it has to be made by itself."""
        quantized = self.quantized
        if quantized is None or not self.ready:
            return None
        if torch.compiler.is_compiling():
            if compute.wants_gradient(x, module._parameters["weight"], module.bias):
                return None
            return compute.traced(x, quantized, module.bias, self._request, prologue)
        if self._obstacle(module, x) is not None:
            return None
        answer = compute.run(x, quantized, module.bias, self._request, prologue)
        if isinstance(answer, FallbackReason):
            return None
        answer.count(self.counts, self.rule)
        return answer.out

    def _obstacle(self, module: nn.Linear, x: torch.Tensor) -> FallbackReason | None:
        if self.left is not None:
            return self.left
        assert self.quantized is not None
        if self.state.disabled:
            return FallbackReason(Fallback.DISABLED)
        if compute.wants_gradient(x, module._parameters["weight"], module.bias):
            return GRADIENT
        if type(x) not in (torch.Tensor, nn.Parameter):
            return SUBCLASS
        if x.device != self.quantized.data.device:
            return FallbackReason(Fallback.LINEAR_DEVICE)
        return None

    def _as_ever(self, module: nn.Linear, x: torch.Tensor, reason: FallbackReason) -> torch.Tensor:
        """The call with the original weight.

        Raises:
            UnsupportedInputError: strict mode, and nobody asked for it.
            PatchError: there is no original.
        """
        self.counts.fallbacks[reason] += 1
        self.check_original()
        if not (reason.cause.asked_for or reason.cause is Fallback.LINEAR_ON_CPU):
            told = f"{self.name}: {reason}; it runs with its original weight"
            if self.state.options.strict:
                raise UnsupportedInputError(f"{told} unless on_unsupported='error' forbids it")
            warn_once(logger, ("linear", reason), "%s (said once)", told)
        weight = module._parameters.get("weight")
        if weight is None:
            return linear(x, module.weight, module.bias)
        if reason is GRADIENT and self.left is None:  # an optimizer may write the weight
            self.bring_home(module)
            self._needed = GRADIENT
        elif self.waiting and shard_of(weight).device != x.device:
            self._fetch(module)
        return linear(x, weight, module.bias)

    # Where the weights are.

    def take(self, module: nn.Module, transforms: Transforms | None) -> None:
        """Become the layer of a linear whose class is swapped already.

        Args:
            module: the linear.
            transforms: what tensor parallelism does around its forward.
        """
        self._transforms, self.sharding = transforms, sharding_of(module)
        if transforms is not None:
            transforms.install(module)
        this = weakref.ref(self)

        def gone(_: object) -> None:
            if (layer := this()) is not None:
                layer.quantized = None

        self._module = weakref.ref(module, gone)
        vars(module)[SLOT] = self

    def begin_again(self) -> None:
        """Forget what kept a kernel off the linear, under former options or places."""
        self.left, self._needed, self._reads = None, None, 0

    def settle(self, module: nn.Module) -> None:
        """Quantize the weight as it is, if a kernel runs where it is, and send it to wait."""
        with _lock:
            weight = _weight_of(module)
            if self.freed or self.ready or self.left is not None:
                return
            if weight is None:
                self.left = WITHOUT_WEIGHT
            else:
                self._quantize(module, weight)

    def check(self, module: nn.Module) -> None:
        """Before an eager forward: note writes to the original, and send it to wait again."""
        weight = _weight_of(module)
        if self.left is not None or self.freed or weight is None:
            return
        if self.ready and weight._version != self._version:
            self.bring_home(module)
        if not self.ready:
            self.settle(module)
        elif not self.waiting and not self.state.disabled:
            self._send_away(weight)

    def _quantize(self, module: nn.Module, weight: torch.Tensor) -> None:
        channels, smooth = weight.shape[1], self.smooth
        kernel = compute.kernel_for(weight, self.kernel)
        if smooth is not None and len(smooth) != channels:  # of a shard of its channels
            kernel = FallbackReason(Fallback.LINEAR_SMOOTHING, (channels, len(smooth)))
        if isinstance(kernel, FallbackReason):
            self._fetch(module)
            self.left, self.quantized = kernel, None
            return
        if self._needed is not None:
            self._reads += 1
            if self._reads >= MOST_READS:
                self.left = self._needed
                return
        self._needed, self._dtype, self._version = None, weight.dtype, weight._version
        rotation = compute.rotation_of(channels, self.rotation)
        self.quantized = compute.quantize_weight(weight, kernel, smooth=smooth, rotation=rotation)
        self.ready = True
        if self.keep:
            self._send_away(weight)
        else:
            module._parameters["weight"] = nn.Parameter(
                torch.empty_like(weight, device="meta"), requires_grad=False
            )
            self.freed = True

    def check_original(self) -> None:
        """Raise unless there is an original.

        Raises:
            PatchError: it was freed.
        """
        if self.freed:
            raise PatchError(
                f"{self.name}: its original weight was freed by keep_originals=False, so that it "
                "can be neither read, saved, copied nor put back; load the model again"
            )

    def prepare_reading(self, module: nn.Module) -> None:
        """Before parameters are saved or copied: shards are gathered from where their linears are.

        Raises:
            PatchError: the original was freed.
        """
        self.check_original()
        weight = module._parameters.get("weight")
        if weight is not None and shard_of(weight) is not weight:
            self.bring_home(module)

    def bring_home(self, module: nn.Module) -> None:
        """Have the original on the linear's device, and the 8-bit weight made anew later."""
        self.check_original()
        self._fetch(module)
        self.ready, self.quantized = False, None
        if self.state.running > 0:
            self._needed = READ

    def forget(self, module: nn.Module) -> None:
        """Take note that the linear gets another weight."""
        if not self.freed:
            self._fetch(module)
        self.freed = self.ready = False
        self.quantized = None

    def release(self, module: nn.Module) -> None:
        """Have the original where it was; nothing is left of the patch but the class."""
        self.check_original()
        self._fetch(module)
        self.ready, self.quantized = False, None
        if self._transforms is not None:
            self._transforms.put_back(module)
        vars(module).pop(SLOT, None)

    def original_parameters(self, module: nn.Module) -> dict[str, nn.Parameter | None]:
        """The parameters as they would be unpatched."""
        self.prepare_reading(module)
        made = dict(module._parameters)
        weight = made.get("weight")
        if self.waiting and weight is not None and self.quantized is not None:
            at_home = weight.data.to(self.quantized.data.device)
            made["weight"] = nn.Parameter(at_home, requires_grad=weight.requires_grad)
        return made

    @contextlib.contextmanager
    def moving(
        self, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[None]:
        """Move the 8-bit weight along; an original that waits stays where it is.

        Args:
            module: the linear.
            fn: what `nn.Module._apply` moves or casts each tensor by.
        """
        weight, quantized = module._parameters.get("weight"), self.quantized
        away = weight is not None and quantized is not None and (self.waiting or self.freed)
        if not away or not self._only_moves(weight, quantized, fn):
            if self.waiting:
                self.bring_home(module)
            yield
            self._arrive(module)
            return
        assert quantized is not None
        target = fn(quantized.scale.new_empty(1)).device
        module._parameters["weight"] = None
        try:
            yield
        finally:
            module._parameters["weight"] = weight
        self.quantized = quantized.to(target)
        kernel = compute.kernel_on(target, self.kernel, self.quantized)
        self.ready = kernel == self.quantized.kernel

    def _only_moves(
        self,
        weight: torch.Tensor | None,
        quantized: QuantizedWeight | None,
        fn: Callable[[torch.Tensor], torch.Tensor],
    ) -> bool:
        """Whether a function of `nn.Module._apply` leaves the dtype, and ends on a device."""
        assert weight is not None
        assert quantized is not None
        moved = fn(torch.empty(1, dtype=weight.dtype, device=quantized.data.device))
        return moved.device.type != "meta" and (moved.dtype == weight.dtype or self.freed)

    def _arrive(self, module: nn.Module) -> None:
        """Settle after a move that came with the original; graphs ask for it before they run."""
        weight = _weight_of(module)
        if weight is None or self.freed:
            return
        quantized = self.quantized
        here = quantized is not None and quantized.data.device == weight.device
        if self.ready and here and self._dtype == weight.dtype:
            return
        self.ready = False
        self.begin_again()
        self.settle(module)

    def _send_away(self, weight: torch.Tensor) -> None:
        if weight.device.type != "cpu":
            weight.data = weight.data.to("cpu")
            self.waiting = True

    def _fetch(self, module: nn.Module) -> None:
        weight = _weight_of(module)
        if self.waiting and weight is not None and self.quantized is not None:
            weight.data = weight.data.to(self.quantized.data.device)
        self.waiting = False

    def saved_bytes(self) -> int:
        """Bytes that the linear takes less on its device; less than 0 where the original is too."""
        module = self.module
        weight = None if module is None else _weight_of(module)
        if weight is None or self.quantized is None:
            return 0
        away = self.waiting or self.freed
        return (weight.nbytes if away else 0) - self.quantized.nbytes


def _weight_of(module: nn.Module) -> torch.Tensor | None:
    """The original weight, or this process's shard of it, where the linear has one."""
    weight = module._parameters.get("weight")
    return None if weight is None else shard_of(weight)
