"""A GPU that is not here, for a process that only compiles for it.

Triton asks its driver which device is active. Where that is one of these, launches are compiled and
kept in Triton's cache under the very names that the real device will ask for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from sage_plugin import device
from sage_plugin.schema import DeviceFacts


@dataclass(frozen=True, slots=True)
class BuildResources:
    """What a compiled kernel takes.

    Attributes:
        name: of the kernel.
        smem_bytes: shared memory of a program.
        registers: per thread, `None` where the toolchain does not tell.
        spill_bytes: of a thread, `None` where the toolchain does not tell.
    """

    name: str
    smem_bytes: int
    registers: int | None = None
    spill_bytes: int | None = None


def become(facts: DeviceFacts) -> None:
    """Let this process compile for a GPU; for good, so for processes that do nothing else."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    device.stand_for(facts)
    if facts.kind == "cuda":
        target = GPUTarget("cuda", int(facts.arch.removeprefix("sm_")), 32)
    else:
        target = GPUTarget("hip", facts.arch, 64 if facts.arch.startswith("gfx9") else 32)
    driver.set_active(_AbsentDriver(target))


class _AbsentDriver:
    """What a launch asks Triton's driver for until it is compiled."""

    def __init__(self, target: Any) -> None:  # noqa: ANN401
        self._target = target

    def get_current_device(self) -> int:
        """Number the one device."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """Name the default stream."""
        return 0

    def get_current_target(self) -> Any:  # noqa: ANN401
        """Return what is compiled for."""
        return self._target


def resources(built: Any) -> BuildResources:  # noqa: ANN401
    """Read what a compiled kernel takes."""
    name, smem = str(built.metadata.name), int(built.metadata.shared)
    assembly = built.asm
    if "amdgcn" in assembly:
        registers = _number(r"\.vgpr_count:\s+(\d+)", assembly["amdgcn"])
        spills = _number(r"\.private_segment_fixed_size:\s+(\d+)", assembly["amdgcn"])
        return BuildResources(name, smem, registers, spills)
    told = _usage(assembly["cubin"]) if "cubin" in assembly else ""
    return BuildResources(name, smem, _number(r"REG:(\d+)", told), _number(r"STACK:(\d+)", told))


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return None if found is None else int(found[1])


def _usage(cubin: bytes) -> str:
    """What NVIDIA's tool says of a kernel's registers and stack; empty where it is missing."""
    import subprocess
    import tempfile

    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            return ""
    return done.stdout
