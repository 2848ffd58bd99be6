"""What the card was doing while it was timed, and the stamp that a table gets for it.

Reads NVML through the optional package `nvidia-ml-py`. Nothing here changes a clock.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

import torch

LOG = logging.getLogger(__name__)

AA_TOLERANCE = 0.01
"""Largest difference that two interleaved timings of one function may show in a clean table."""

SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
"""NVML's event bits that make timings worthless.

The software power cap (0x04) is not among them: a data-centre card under attention runs at its cap
all the time, and interleaving takes care of it. The snapshot records it.
"""
POWER_CAP = {0x04: "power cap"}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClockSnapshot:
    """State of one GPU at one moment; `None` where the driver does not tell."""

    sm_mhz: int | None
    memory_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    power_limit_w: float | None
    reasons: tuple[str, ...]

    @property
    def throttled(self) -> bool:
        """Whether the card protects itself, by more than staying at its power limit."""
        return any(reason in SLOWDOWNS.values() for reason in self.reasons)


def snapshot(device: torch.device | str | int) -> ClockSnapshot | None:
    """Clocks, temperature and power now; `None` on a CPU, without NVML or where NVML refuses."""
    resolved = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if resolved.type != "cuda" or not torch.cuda.is_available():
        return None
    nvml = _nvml()
    if nvml is None:
        return None
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    handle = _handle(nvml, torch.cuda.get_device_properties(index))
    return None if handle is None else _read(nvml, handle)


def stamp(aa_ratio: float | None, before: ClockSnapshot | None, after: ClockSnapshot | None) -> str:
    """Say how far a table can be trusted: `clean`, `noisy` or `throttled`."""
    if any(state is not None and state.throttled for state in (before, after)):
        return "throttled"
    return "clean" if aa_ratio is not None and abs(aa_ratio - 1) < AA_TOLERANCE else "noisy"


@functools.cache
def _nvml() -> ModuleType | None:
    """The NVML module, initialised, or `None`."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # not installed, or one of NVML's many ways to refuse
        LOG.debug("no clock readings: %s", error)
        return None
    return pynvml


def _handle(nvml: ModuleType, properties: object) -> object | None:
    """NVML's handle of torch's device: by UUID, since both may number the cards differently."""
    uuid = getattr(properties, "uuid", None)
    if uuid is None:
        return None
    text = str(uuid)
    text = text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"
    return _guarded(lambda: nvml.nvmlDeviceGetHandleByUUID(text))


def _read(nvml: ModuleType, handle: object) -> ClockSnapshot:
    bits = _guarded(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    if bits is None:  # the name before driver 535
        bits = _guarded(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    known = {**SLOWDOWNS, **POWER_CAP}
    power = _guarded(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    limit = _guarded(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    return ClockSnapshot(
        sm_mhz=_guarded(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        memory_mhz=_guarded(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        temperature_c=_guarded(
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        ),
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
        reasons=tuple(name for bit, name in known.items() if (bits or 0) & bit),
    )


def _guarded(read: Callable[[], T]) -> T | None:
    """One NVML reading; cards answer NotSupported to single questions."""
    try:
        return read()
    except Exception as error:
        LOG.debug("NVML: %s", error)
        return None
