"""What a device is: identity, slug, limits. The writer and the reader of configs both ask here.

HIP is told from CUDA by `torch.version.hip`, never by a capability number.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from sage_plugin.errors import DeviceError, UsageError
from sage_plugin.schema import ATTENTION, DeviceFacts, Toolchain

E4M3FN_ARCHS = (
    *("sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"),
    *("gfx950", "gfx1200", "gfx1201"),
)
E4M3FNUZ_ARCHS = ("gfx942",)


def slug(name: str) -> str:
    """File-system safe form of a driver's device name.

    Example:
        >>> slug("NVIDIA H100 80GB HBM3")
        'nvidia-h100-80gb-hbm3'
    """
    text = re.sub(r"\((?:r|tm)\)", "", name.strip().lower())
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-") or "unknown"


def fp8_dtype(arch: str) -> str | None:
    """Torch's name of the FP8 type of an architecture's matrix units, or `None`.

    gfx942 multiplies e4m3fnuz (largest value 240), the others e4m3fn (448).
    """
    if arch in E4M3FN_ARCHS:
        return "float8_e4m3fn"
    if arch in E4M3FNUZ_ARCHS:
        return "float8_e4m3fnuz"
    return None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this machine.

    Attributes:
        index: its number, as torch counts.
        uuid: what names it wherever it is counted.
    """

    index: int
    uuid: str


def gpus() -> tuple[Gpu, ...]:
    """List the GPUs that torch sees.

    Raises:
        DeviceError: there is none.
    """
    if not torch.cuda.is_available():
        raise DeviceError("no GPU that torch can use: install a CUDA or ROCm build, or use the CPU")
    return tuple(Gpu(index, _uuid(index)) for index in range(torch.cuda.device_count()))


def _uuid(index: int) -> str:
    """The driver's name of a GPU, or its number where it tells none."""
    text = str(getattr(torch.cuda.get_device_properties(index), "uuid", index))
    return text if text.startswith(("GPU-", "MIG-")) or text.isdigit() else f"GPU-{text}"


_stand_in: DeviceFacts | None = None


def stand_for(absent: DeviceFacts) -> None:
    """Let every device of this process be one that is not here: one that compiles runs nothing."""
    global _stand_in
    _stand_in = absent


def facts(device: torch.device | str | int | None = None) -> DeviceFacts:
    """Identity and limits of a device; memoised.

    Args:
        device: a torch device, its name, or a CUDA index; `None` is the current GPU, else the CPU.

    Raises:
        DeviceError: the device does not exist here.
    """
    if _stand_in is not None:
        return _stand_in
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError:
        raise DeviceError(f"device {device!r}: only cpu and cuda (ROCm too) are known") from None
    if resolved.type == "cpu":
        return _cpu_facts()
    if resolved.type != "cuda":
        raise DeviceError(f"device {str(resolved)!r}: only cpu and cuda (ROCm too) are known")
    if not torch.cuda.is_available():
        raise DeviceError("no GPU that torch can use: install a CUDA or ROCm build, or use the CPU")
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    if index >= torch.cuda.device_count():
        raise DeviceError(f"GPU {index} does not exist: there are {torch.cuda.device_count()}")
    return _gpu_facts(index)


def facts_of(kind: str, index: int | None) -> DeviceFacts:
    """Facts of a tensor's device by type and index, a constant to a compiler; any type has some."""
    if kind not in ("cpu", "cuda"):
        return DeviceFacts(kind, kind, "other", kind, 0, 0, 0, None)
    return facts(torch.device(kind, index) if index is not None else kind)


# What `torch.compiler.assume_constant_result` does, without its import of the whole compiler.
vars(facts_of)["_dynamo_marked_constant"] = True


def chosen(name: str | None) -> tuple[torch.device, DeviceFacts]:
    """Return the device of a name as a user gives it, with its number, and its facts.

    Args:
        name: `cpu`, `cuda` or `cuda:1`; `None` is a GPU if there is one.

    Raises:
        UsageError: the name is not one of a device.
        DeviceError: torch cannot use it here.

    Example:
        >>> chosen("cpu:0")[0]
        device(type='cpu')
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name!r}: use cpu, cuda or cuda:1") from None
    found = facts(device)
    if device.type == "cpu":  # whatever its number
        return torch.device("cpu"), found
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.device("cuda", index), found


@functools.cache
def _cpu_facts() -> DeviceFacts:
    machine = platform.machine() or "unknown"
    return DeviceFacts(
        slug=slug(f"cpu-{machine}"),
        name=f"CPU {machine}",
        kind="cpu",
        arch=machine,
        sm_count=os.cpu_count() or 1,
        memory_bytes=0,
        smem_bytes=0,
        fp8_dtype="float8_e4m3fn",
    )


@functools.cache
def _gpu_facts(index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    if hip:
        arch = properties.gcnArchName.split(":")[0]
    else:
        arch = f"sm_{properties.major}{properties.minor}"
    smem = getattr(properties, "shared_memory_per_block_optin", 0)
    return DeviceFacts(
        slug=slug(properties.name),
        name=properties.name,
        kind="hip" if hip else "cuda",
        arch=arch,
        sm_count=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        smem_bytes=smem or properties.shared_memory_per_block,
        fp8_dtype=fp8_dtype(arch),
    )


@functools.cache
def toolchain(family: str = ATTENTION) -> Toolchain:
    """Return the versions that measurements of an op family depend on."""
    from sage_plugin import __version__

    return Toolchain(
        sage_plugin=__version__,
        torch=torch.__version__,
        triton=triton_version(),
        python=platform.python_version(),
        driver=_driver(),
        kernels=_sources_hash(family),
    )


def _sources_hash(family: str) -> str:
    """Hash the sources of a family's kernels: sixteen digits, which any edit changes."""
    kernels = Path(__file__).with_name("kernels")
    parts = ("primitives.py", "quantize/**/*.py", f"{family}/backends/**/*.py")
    digest = hashlib.sha256()
    for path in sorted(path for part in parts for path in kernels.glob(part)):
        digest.update(path.relative_to(kernels).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def triton_version() -> str:
    """Triton's version, or an empty string where it cannot be imported for whatever reason."""
    try:
        import triton
    except Exception:  # a broken install raises OSError or RuntimeError too (report 104)
        return ""
    return str(triton.__version__)


def _driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # optional package, and NVML refuses in many ways
        return ""
