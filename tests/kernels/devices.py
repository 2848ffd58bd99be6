"""Devices of every architecture, as far as launch configs depend on them."""

from __future__ import annotations

from sage_plugin import device
from sage_plugin.kernels.attention import dispatch
from sage_plugin.schema import DeviceFacts
from tests.kernels.calls import EMULATED

KIB = 2**10
SMEM_KIB = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_87": 163,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_103": 227,
    "sm_110": 227,
    "sm_120": 99,
    "sm_121": 99,
    "gfx942": 64,
    "gfx950": 160,
    "gfx1100": 64,
    "gfx1151": 64,
    "gfx1201": 64,
}
CPU = device.facts("cpu")


def facts(arch: str) -> DeviceFacts:
    """A device by architecture, with its real limit of shared memory."""
    return DeviceFacts(
        slug=f"test-{arch.replace('_', '-')}",
        name=f"Test {arch}",
        kind="hip" if arch.startswith("gfx") else "cuda",
        arch=arch,
        sm_count=100,
        memory_bytes=2**34,
        smem_bytes=SMEM_KIB[arch] * KIB,
        fp8_dtype=device.fp8_dtype(arch),
    )


def claimed(arch: str) -> list[str]:
    """The kernels with a launch config that a device runs."""
    return [k for k in dispatch.kernels_of(facts(arch)) if k in EMULATED]
