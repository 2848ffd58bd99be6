"""A grouped linear on its device: judged on sampled rows, timed as a patched model makes it."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch

from sage_plugin.accuracy.output import ExactRows
from sage_plugin.capture.record import LinearCapture
from sage_plugin.capture.store.linear_file import GROUP_SIZES, WEIGHT_RMS
from sage_plugin.capture.store.reader import CaptureFolder
from sage_plugin.families.family import SplitCall
from sage_plugin.families.grouped_linear.routing import SKEWED, drawn_sizes, sampled_sizes
from sage_plugin.families.linear import cost
from sage_plugin.families.linear import replay as of_linears
from sage_plugin.families.linear.replay import LinearReplay
from sage_plugin.kernels.contract import HOST, Decision
from sage_plugin.kernels.grouped_linear.api import grouped_linear
from sage_plugin.kernels.grouped_linear.backends.torch_products import takes
from sage_plugin.kernels.grouped_linear.call import GroupedLinearCall
from sage_plugin.kernels.grouped_linear.executor import (
    GroupedExecutor,
    host_grouped_linear,
    resolve,
)
from sage_plugin.kernels.grouped_linear.operands import ends_of
from sage_plugin.kernels.grouped_linear.weight import quantize_weights
from sage_plugin.kernels.linear.dispatch import BASELINE
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.schema import DeviceFacts, LinearLaunch, LinearShape


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GroupedReplay(LinearReplay):
    """Tensors of a call, as `families.family.ReplayCall`; weight is (E, N, K) and bias (E, N).

    Attributes:
        group_sizes: (E,) rows of each group among those that are here.
        full_sizes: likewise of the full call.
    """

    group_sizes: torch.Tensor
    full_sizes: torch.Tensor

    def full_size(self, shape: LinearShape) -> GroupedReplay:
        """Repeat the saved rows to those of the full call with its own groups, for timing."""
        if shape == self.shape:
            return self
        rows = torch.arange(shape.rows, device=self.x.device) % self.x.shape[0]
        return GroupedReplay(
            self.x[rows], self.weight, self.bias, shape, group_sizes=self.full_sizes,
            full_sizes=self.full_sizes,
        )  # fmt: skip

    def exact(self, rows: torch.Tensor | None = None) -> ExactRows:
        """Compute rows of the output in fp64, the same of each block of rows."""
        blocks = self._blocks()
        rows, size = self._judged(rows)
        first = torch.arange(blocks)[:, None] * size
        places = (first + rows).flatten().to(self.x.device)
        ends = ends_of(self.group_sizes, self.shape.rows)
        groups = torch.searchsorted(ends, places, right=True)
        shape = (len(places), self.shape.out_features)
        out, mean = (torch.zeros(shape, dtype=torch.float64, device=self.x.device) for _ in "xy")
        of_mean = self.x[: int(ends[-1])].float().mean(0).double()
        for group in groups.unique().tolist():
            if group < self.shape.groups:  # others are 0
                weight = self.weight[group].double()
                bias = None if self.bias is None else self.bias[group].double()
                own = groups == group
                x = self.x[places[own]].double()
                out[own] = torch.nn.functional.linear(x, weight, bias)
                mean[own] = torch.nn.functional.linear(of_mean, weight, bias)
        parts = (part.float().view(1, blocks, len(rows), -1) for part in (out, mean))
        return ExactRows(rows, *parts)

    def split(
        self, decision: Decision, config: LinearLaunch | None, facts: DeviceFacts
    ) -> SplitCall:
        """Quantize for a kernel, and return the call in its two parts."""
        whole = self.whole(decision, config)
        if decision.variant == HOST or decision.kernel == BASELINE:
            return SplitCall(whole, whole, False, cost.moved_bytes(self.shape))
        call, executor = self._resolved(decision, config)
        assert executor.backend is not None
        with torch.cuda.device(self.x.device) if self.x.is_cuda else contextlib.nullcontext():
            operands = executor.operands(call)
        multiply = functools.partial(executor.backend, operands, self.dtype)
        read = sum(one.nbytes for one in operands if one is not None)
        return SplitCall(whole, multiply, True, read + cost.output_bytes(self.shape))

    def _stock(self) -> torch.Tensor:
        """Multiply as the stock path does: rows beyond the groups are not written."""
        ends = torch.cumsum(self.group_sizes, 0, dtype=torch.int32)
        shape, size = self.shape, self.x.element_size()
        if self.bias is not None or not takes(shape.in_features, shape.out_features, size):
            return host_grouped_linear(self._call())
        return torch.nn.functional.grouped_mm(self.x, self.weight.transpose(1, 2), offs=ends)

    def _call(self) -> GroupedLinearCall:
        return GroupedLinearCall(self.x, self.weight, self.group_sizes, self.bias)

    def _resolved(
        self, decision: Decision, config: LinearLaunch | None
    ) -> tuple[GroupedLinearCall, GroupedExecutor]:
        call = self._call()
        if decision.kernel != BASELINE:
            call = call._replace(weights=quantize_weights(self.weight, decision.kernel))
        executor = resolve(call, BackendRequest(decision.kernel, decision.variant, config))
        assert isinstance(executor, GroupedExecutor), "it was decided that the kernel takes it"
        return call, executor

    def _computed(
        self, decision: Decision, config: LinearLaunch | None, dtype: torch.dtype
    ) -> torch.Tensor:
        if decision.variant == HOST:
            exact = dtype == torch.float32  # before the last rounding
            x, weights, sizes, bias, _ = self._call()
            assert isinstance(x, torch.Tensor)
            wide = GroupedLinearCall(x.float() if exact else x, weights, sizes, bias)
            return host_grouped_linear(wide)
        return grouped_linear(
            self.x, self.weight, self.group_sizes, bias=self.bias, kernel=decision.kernel,
            backend=decision.variant, out_dtype=dtype, launch=config,
        )  # fmt: skip


def captured(
    folder: CaptureFolder, record: LinearCapture, device: torch.device | str
) -> GroupedReplay:
    """Load a capture with the weights that its rows met, or drawn ones of their size.

    Raises:
        CaptureError: it is damaged, or so are its weights.
    """
    tensors = folder.tensors(record, device)
    x, full = tensors["x"], tensors[GROUP_SIZES]
    if record.weight_file:
        weight = folder.weight(record, device)
    else:
        shape = record.shape
        size = (shape.groups, shape.out_features, shape.in_features)
        seed = int(record.weight_sha256[:8] or "0", 16)
        generator = torch.Generator(device).manual_seed(seed)
        weight = torch.randn(size, device=device, generator=generator, dtype=x.dtype)
        weight *= tensors[WEIGHT_RMS].to(x.dtype)[:, None, None]
    bias = tensors.get("bias")
    return GroupedReplay(
        x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype),
        of_linears.saved_shape(record), full_sizes=full,
        group_sizes=sampled_sizes(full.cpu(), record.rows).to(full.device),
    )  # fmt: skip


def drawn(
    shape: LinearShape, device: torch.device | str, seed: int = 0, distribution: str = "normal"
) -> GroupedReplay:
    """Draw input, weights and bias as those of linears; `skewed` draws normal ones.

    Raises:
        UsageError: the distribution or the dtype is unknown.

    Example:
        >>> drawn(LinearShape(4, 8, 16, "bfloat16", groups=3), "cpu").group_sizes
        tensor([2, 1, 1], dtype=torch.int32)
    """
    plain = "normal" if distribution == SKEWED else distribution
    one = of_linears.drawn(shape, device, seed, plain)
    sizes = drawn_sizes(shape.rows, shape.groups, distribution, seed).to(device)
    return GroupedReplay(
        one.x, one.weight, one.bias, one.shape, group_sizes=sizes, full_sizes=sizes
    )
