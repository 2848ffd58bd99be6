"""What makes a launch config illegal whatever it launches: hardware, registers, shared memory."""

from __future__ import annotations

from sage_plugin.kernels.support import TMA_ARCHS
from sage_plugin.schema import AnyLaunch, DeviceFacts

Checks = tuple[tuple[bool, str], ...]
"""Conditions of legality, each with what is wrong where it does not hold."""

LOADS = ("pointer", "descriptor")
POWERS = (16, 32, 64, 128, 256)
"""Sizes of blocks."""


def one_of(config: AnyLaunch, **allowed: tuple[int | str, ...] | range) -> Checks:
    """Return the checks of fields with few values."""
    return tuple(
        (getattr(config, name) in values,
         f"{name} {getattr(config, name)} is not one of {', '.join(map(str, values))}")
        for name, values in allowed.items()
    )  # fmt: skip


def hardware_checks(config: AnyLaunch, facts: DeviceFacts) -> Checks:
    """Return the checks of what the hardware has, and of the options of its compiler."""
    return (
        (config.loads != "descriptor" or facts.arch in TMA_ARCHS or facts.kind == "cpu",
         f"loads 'descriptor' needs TMA, which {facts.arch} does not have"),
        (facts.kind != "hip" or config.num_stages <= 2,
         f"num_stages {config.num_stages} on AMD is limited to 2"),
        (config.maxnreg == 0 or (32 <= config.maxnreg <= 255 and facts.kind != "hip"),
         f"maxnreg {config.maxnreg} is not between 32 and 255, on NVIDIA"),
        (config.waves_per_eu == 0 or (1 <= config.waves_per_eu <= 8 and facts.kind != "cuda"),
         f"waves_per_eu {config.waves_per_eu} is not between 1 and 8, on AMD"),
        (config.matrix_instr_nonkdim == 0
         or (config.matrix_instr_nonkdim in (16, 32) and facts.kind != "cuda"),
         f"matrix_instr_nonkdim {config.matrix_instr_nonkdim} is not 16 or 32, on AMD"),
    )  # fmt: skip


def first_wrong(checks: Checks, smem_bytes: int, facts: DeviceFacts) -> str | None:
    """Return what is wrong first, in one sentence, or `None`.

    Args:
        checks: what has to hold.
        smem_bytes: shared memory that a launch needs at least.
        facts: the device.
    """
    for legal, reason in checks:
        if not legal:
            return reason
    if facts.smem_bytes and smem_bytes > facts.smem_bytes:
        return (
            f"needs at least {smem_bytes} bytes of shared memory, {facts.name} has "
            f"{facts.smem_bytes}"
        )
    return None
