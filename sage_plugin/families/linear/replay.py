"""A linear on its device: judged on sampled rows, timed as a patched model makes it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sage_plugin.accuracy.output import ExactRows
from sage_plugin.capture.record import LinearCapture
from sage_plugin.capture.store.reader import CaptureFolder
from sage_plugin.families.family import ReplayCall, SplitCall
from sage_plugin.families.linear import cost
from sage_plugin.families.linear.balance import Balance
from sage_plugin.kernels.contract import HOST, Decision
from sage_plugin.kernels.linear.api import linear
from sage_plugin.kernels.linear.call import LinearCall
from sage_plugin.kernels.linear.executor import LinearExecutor, host_linear, resolve
from sage_plugin.kernels.linear.weight import QuantizedWeight
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.measure.inputs import drawer, torch_dtype
from sage_plugin.schema import DeviceFacts, LinearLaunch, LinearShape

BLOCKS = 8
"""Blocks of rows that are judged one by one, as heads are."""

JUDGED_ROWS = 256
"""Rows whose exact output is computed, in all."""

OUTLIER_CHANNELS, OUTLIER_SCALE, CHANNEL_BIAS = 2, 40.0, 3.0


@dataclass(frozen=True, slots=True, eq=False)
class LinearReplay(ReplayCall):
    """Tensors of a call, as `families.family.ReplayCall`.

    Attributes:
        x: (M, K).
        weight: (N, K).
        bias: (N,), or `None`.
        shape: their shape.
        balance: what is done to input channels, nothing if `None`.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    shape: LinearShape
    balance: Balance | None = None

    def balanced(self, balance: Balance) -> LinearReplay:
        """Return the same call with its input channels rotated or smoothed."""
        return dataclasses.replace(self, balance=balance)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its output."""
        return self.x.dtype

    def inputs(self) -> dict[str, torch.Tensor]:
        """Name its tensors."""
        named = {"x": self.x, "weight": self.weight}
        return named if self.bias is None else named | {"bias": self.bias}

    def full_size(self, shape: LinearShape) -> LinearReplay:
        """Repeat the saved rows to those of the full call, for timing."""
        if shape == self.shape:
            return self
        rows = torch.arange(shape.rows, device=self.x.device) % self.x.shape[0]
        return LinearReplay(self.x[rows], self.weight, self.bias, shape, self.balance)

    def exact(self, rows: torch.Tensor | None = None) -> ExactRows:
        """Compute rows of the output in fp64, the same of each block of rows."""
        blocks = self._blocks()
        rows, size = self._judged(rows)
        x = self.x.view(blocks, size, -1)[:, rows.to(self.x.device)].double()
        weight = self.weight.double()
        bias = None if self.bias is None else self.bias.double()
        out = torch.nn.functional.linear(x, weight, bias).float()[None]
        of_mean = self.x.float().mean(0).double()
        mean = torch.nn.functional.linear(of_mean, weight, bias).float()
        return ExactRows(rows, out, mean.expand(1, blocks, 1, -1))

    def output(
        self, decision: Decision, config: LinearLaunch | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Run a kernel as `linear` does, block by block of rows."""
        return self._computed(decision, config, dtype).view(self.judged_size())

    def _computed(
        self, decision: Decision, config: LinearLaunch | None, dtype: torch.dtype
    ) -> torch.Tensor:
        if decision.variant == HOST:
            exact = dtype == torch.float32  # before the last rounding
            tensors = (self.x, self.weight, self.bias)
            wide = [None if t is None else t.float() if exact else t for t in tensors]
            return host_linear(*wide)  # type: ignore[arg-type]
        weight: torch.Tensor | QuantizedWeight = self.weight
        if self.balance is not None:
            weight = self.balance.quantized(self.weight, decision.kernel)
        return linear(
            self.x, weight, self.bias, kernel=decision.kernel, backend=decision.variant,
            out_dtype=dtype, launch=config,
        )  # fmt: skip

    def judged_size(self) -> tuple[int, ...]:
        """Return the shape of the output with blocks of rows as heads."""
        blocks = self._blocks()
        return (1, blocks, self.shape.rows // blocks, self.shape.out_features)

    def whole(
        self, decision: Decision | None = None, config: LinearLaunch | None = None
    ) -> Callable[[], object]:
        """Return the call with the quantization of its input, or torch's linear.

        The weight is quantized before.
        """
        if decision is None or decision.variant == HOST:
            return self._stock
        call, executor = self._resolved(decision, config)

        def run() -> torch.Tensor:
            # A model gives each linear a new input: nothing is found quantized.
            return executor.run(call._replace(x=self.x.view(self.x.shape)))

        return run

    def split(
        self, decision: Decision, config: LinearLaunch | None, facts: DeviceFacts
    ) -> SplitCall:
        """Quantize for a kernel, and return the call in its two parts."""
        whole = self.whole(decision, config)
        if decision.variant == HOST:
            return SplitCall(whole, whole, False, cost.moved_bytes(self.shape))
        call, executor = self._resolved(decision, config)
        weight = call.weight
        assert not isinstance(weight, torch.Tensor)
        assert executor.backend is not None
        on_gpu = self.x.is_cuda
        with torch.cuda.device(self.x.device) if on_gpu else contextlib.nullcontext():
            rows = executor.rows(call, weight)
        multiply = functools.partial(executor.backend.multiply, rows, weight, self.bias, self.dtype)
        return SplitCall(whole, multiply, True, cost.product_bytes(rows, weight, self.shape))

    def flops(self) -> int:
        """Count its operations."""
        return cost.flops(self.shape)

    def _judged(self, rows: torch.Tensor | None) -> tuple[torch.Tensor, int]:
        """Rows of each block that are judged, evenly spread if `None`, and the size of a block."""
        blocks = self._blocks()
        size = self.shape.rows // blocks
        if rows is None:
            count = min(size, max(1, JUDGED_ROWS // blocks))
            rows = torch.arange(count) * size // count
        return rows, size

    def _blocks(self) -> int:
        """How many blocks of equal size there are."""
        return next(n for n in (BLOCKS, 4, 2, 1) if self.shape.rows % n == 0)

    def _stock(self) -> torch.Tensor:
        """Multiply as the stock path does."""
        return host_linear(self.x, self.weight, self.bias)

    def _resolved(self, decision: Decision, config: LinearLaunch | None) -> tuple[Any, Any]:
        balance = self.balance or Balance()
        weight = balance.quantized(self.weight, decision.kernel)
        call = LinearCall(self.x, weight, self.bias)
        executor = resolve(call, BackendRequest(decision.kernel, decision.variant, config))
        assert isinstance(executor, LinearExecutor), "it was decided that the kernel takes it"
        return call, executor


def saved_shape(record: LinearCapture) -> LinearShape:
    """Return the shape of what a capture holds of its call."""
    return dataclasses.replace(record.shape, rows=record.rows)


def captured(
    folder: CaptureFolder, record: LinearCapture, device: torch.device | str
) -> LinearReplay:
    """Load a capture with the weight that its rows met.

    Raises:
        CaptureError: it is damaged, or the weight is not in the folder.
    """
    weight = folder.weight(record, device)
    tensors = folder.tensors(record, device)
    x, bias = tensors["x"], tensors.get("bias")
    bias = None if bias is None else bias.to(x.dtype)
    return LinearReplay(x, weight.to(x.dtype), bias, saved_shape(record))


def drawn(
    shape: LinearShape, device: torch.device | str, seed: int = 0, distribution: str = "normal"
) -> LinearReplay:
    """Draw input, weight and bias in fp32, and round them to the dtype.

    `normal` is N(0, 1), with a weight of N(0, 1 / K). `biased` adds a bias 3 N(0, 1) to each input
    channel, `drift` 1 to the first half of the rows and -1 to the second, and `outlier` multiplies
    two input channels by 40.

    Raises:
        UsageError: the distribution or the dtype is unknown.

    Example:
        >>> drawn(LinearShape(4, 8, 16, "bfloat16"), "cpu").weight.shape
        torch.Size([16, 8])
    """
    dtype, draw = torch_dtype(shape.dtype), drawer(device, seed, distribution)
    x = draw(shape.rows, shape.in_features)
    if distribution == "biased":
        x += CHANNEL_BIAS * draw(1, shape.in_features)
    if distribution == "drift":
        x[: shape.rows // 2] += 1.0
        x[shape.rows // 2 :] -= 1.0
    if distribution == "outlier":
        x[:, :OUTLIER_CHANNELS] *= OUTLIER_SCALE
    groups = (shape.groups,) if shape.groups else ()
    weight = draw(*groups, shape.out_features, shape.in_features) * shape.in_features**-0.5
    bias = draw(*groups, shape.out_features).to(dtype) if shape.bias else None
    return LinearReplay(x.to(dtype), weight.to(dtype), bias, dataclasses.replace(shape))
