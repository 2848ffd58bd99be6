"""Devices of every architecture, as far as launch configs and decisions depend on them."""

from __future__ import annotations

from sage_plugin import device
from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.support import ARCHITECTURES
from sage_plugin.schema import DeviceFacts
from tests.kernels.calls import EMULATED

KIB = 2**10
SMEM_KIB = {n: row.smem_kib for row in ARCHITECTURES if row.kernels for n in row.names}
"""Of those that run a kernel; the test of the support table holds it to the vendors' numbers."""
CPU = device.facts("cpu")


def facts(arch: str, **changes: object) -> DeviceFacts:
    """A device by architecture, as `device.facts` would tell it, with fields changed."""
    kind = "cuda" if arch.startswith("sm_") else "hip" if arch.startswith("gfx") else "cpu"
    fields = {
        "slug": f"test-{arch.replace('_', '-')}",
        "name": f"Test {arch}",
        "kind": kind,
        "arch": arch,
        "sm_count": 100,
        "memory_bytes": 2**34,
        "smem_bytes": 0 if kind == "cpu" else SMEM_KIB.get(arch, 48) * KIB,
        "fp8_dtype": "float8_e4m3fn" if kind == "cpu" else device.fp8_dtype(arch),
    }
    return DeviceFacts(**(fields | changes))


def claimed(arch: str) -> list[str]:
    """The kernels with a launch config that a device runs."""
    return [k for k in dispatch.kernels_of(facts(arch)) if k in EMULATED]
