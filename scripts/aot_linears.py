"""One linear on a GPU that is not here, for `scripts/aot_builds.py`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch

from sage_plugin import device
from sage_plugin.kernels.grouped_linear import launch_space as of_groups
from sage_plugin.kernels.linear import launch_space
from sage_plugin.kernels.support import ARCHITECTURES
from sage_plugin.schema import DeviceFacts, LinearKey, LinearLaunch

SMEM_KIB = {name: row.smem_kib for row in ARCHITECTURES for name in row.names}


def facts_of(arch: str) -> DeviceFacts:
    """A device of an architecture, with the shared memory that one program may use there."""
    return DeviceFacts(
        slug=arch,
        name=f"Test {arch}",
        kind="cuda" if arch.startswith("sm_") else "hip",
        arch=arch,
        sm_count=100,
        memory_bytes=2**34,
        smem_bytes=SMEM_KIB[arch] * 2**10,
        fp8_dtype=device.fp8_dtype(arch),
    )


@dataclass(frozen=True)
class LinearBuild:
    """One linear on one architecture.

    Attributes:
        rows: rows of the input.
        prologue: what comes before the quantization of its rows.
        groups: weights of a grouped linear, 0 for a linear.
        launch: fields changed in the default launch config.
    """

    linear: str
    arch: str
    rows: int
    in_features: int = 2048
    out_features: int = 2048
    dtype: str = "bfloat16"
    prologue: str = "none"
    rotation: int = 0
    asymmetric: bool = False
    groups: int = 0
    launch: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> DeviceFacts:
        """The device."""
        return facts_of(self.arch)

    def config(self) -> LinearLaunch:
        """The architecture's default, with the call's own changes."""
        key = LinearKey(
            self.linear, "triton", self.in_features, self.out_features, self.dtype, self.rows,
            self.groups,
        )  # fmt: skip
        space = of_groups if self.groups else launch_space
        return space.default_launch(key, self.facts()).replaced(**self.launch)

    def bound_bytes(self) -> int:
        """Shared memory that it needs at least."""
        size = 2 if self.linear == "bf16" else 1
        return launch_space.smem_lower_bound(self.config()) * size

    def load(self) -> None:
        """Import what launches."""
        importlib.import_module("sage_plugin.kernels.linear.backends.triton.products")
        importlib.import_module("sage_plugin.kernels.linear.backends.triton.rows")
        for name in ("products", "routing_kernel", "combine_kernel"):
            importlib.import_module(f"sage_plugin.kernels.grouped_linear.backends.triton.{name}")

    def run(self) -> None:
        """Launch both steps on zeros, with everything that a norm may have."""
        if self.groups:
            self._run_groups()
            return
        from sage_plugin.kernels.linear.backends.triton.products import TritonProducts
        from sage_plugin.kernels.linear.backends.triton.rows import quantize_rows_triton
        from sage_plugin.kernels.linear.rows.prologue import NORMS, Prologue
        from sage_plugin.kernels.linear.weight import quantize_weight

        x = torch.zeros(2, self.rows // 2, self.in_features, dtype=getattr(torch, self.dtype))
        norm = self.prologue in NORMS
        of_channels = x[0, 0].float() if norm else None
        prologue = Prologue(
            self.prologue,
            gate=x.clone() if self.prologue == "swiglu" else None,
            weight=of_channels,
            bias=of_channels if self.prologue == "layer_norm" else None,
            factor=x[:, :1] if norm else None,
            shift=x[:, :1] if norm else None,
        )
        weight = quantize_weight(
            torch.zeros(self.out_features, self.in_features), self.linear,
            smooth=torch.ones(self.in_features), rotation=self.rotation, asymmetric=self.asymmetric,
        )  # fmt: skip
        kept = torch.empty_like(x) if norm else None
        rows = quantize_rows_triton(x, weight.row_format, weight.smooth, prologue, kept)
        bias = torch.zeros(self.out_features, dtype=x.dtype)
        TritonProducts(self.config()).multiply(rows, weight, bias, x.dtype)

    def _run_groups(self) -> None:
        """Launch all that experts do between their inputs and outputs on zeros."""
        from sage_plugin.kernels.grouped_linear.backends.triton.combine_kernel import (
            combine_triton,
        )
        from sage_plugin.kernels.grouped_linear.backends.triton.products import (
            multiply_groups_triton,
        )
        from sage_plugin.kernels.grouped_linear.backends.triton.routing_kernel import route_triton
        from sage_plugin.kernels.grouped_linear.operands import GroupedOperands
        from sage_plugin.kernels.linear.backends.triton.rows import quantize_rows_triton
        from sage_plugin.kernels.linear.rows.row_format import row_format

        quantized, dtype = self.linear != "bf16", getattr(torch, self.dtype)
        kind = dtype
        if quantized:
            fp8 = getattr(torch, self.facts().fp8_dtype or "float8_e4m3fn")
            form = row_format(self.linear, fp8=fp8)
            kind = form.dtype
            tokens = torch.zeros(self.rows // 4, self.in_features, dtype=dtype)
            places, _ = route_triton(torch.zeros(self.rows // 4, 4).long(), self.groups)
            quantize_rows_triton(tokens, form, copies=places)
        operands = GroupedOperands(
            torch.zeros(self.rows, self.in_features, dtype=kind),
            torch.zeros(self.rows, 1) if quantized else None,
            torch.zeros(self.groups, self.out_features, self.in_features, dtype=kind),
            torch.zeros(self.groups, self.out_features) if quantized else None,
            torch.zeros(self.groups, dtype=torch.int32),
            torch.zeros(self.groups, self.out_features, dtype=dtype),
        )
        out = multiply_groups_triton(operands, dtype, self.config())
        if quantized:
            combine_triton(out, torch.zeros(places.shape), places, dtype)
