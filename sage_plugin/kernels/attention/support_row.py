"""What a kernel runs as on a device, for people to read: `sage doctor` and the hardware tables."""

from __future__ import annotations

from dataclasses import dataclass

from sage_plugin.kernels.attention.launch_space import default_config
from sage_plugin.kernels.support import FP8_KERNELS, device_reason, gpu_variant, hopper_reason
from sage_plugin.schema import DeviceFacts, LaunchConfig


@dataclass(frozen=True, slots=True)
class Support:
    """What the table says about one kernel on one device.

    Attributes:
        kernel: the kernel.
        variant: the variant that runs; `None` where none does.
        fp8_dtype: FP8 type that it multiplies, `None` where it does not.
        launch: default launch config, `None` for torch's own kernels.
        reason: why none runs, in one sentence.
    """

    kernel: str
    variant: str | None
    fp8_dtype: str | None = None
    launch: LaunchConfig | None = None
    reason: str | None = None


def support(
    kernel: str, facts: DeviceFacts, *, head_dim: int = 128, dtype: str = "bfloat16"
) -> Support:
    """The variant, FP8 type and default launch config of a kernel on a device, or why none runs."""
    if kernel in ("torch", "sdpa"):
        return Support(kernel, "host")
    if reason := device_reason(kernel, facts):
        return Support(kernel, None, reason=str(reason))
    arch, variant = "emulation", "emulation"
    if facts.kind != "cpu":
        arch = facts.arch
        variant = gpu_variant(kernel, head_dim, hopper_reason(kernel, facts, head_dim))
    config = default_config(kernel, arch, head_dim, dtype, variant)
    if config is None:
        return Support(kernel, None, reason=f"{kernel} takes no head dim {head_dim}")
    fp8 = facts.fp8_dtype if kernel in FP8_KERNELS else None
    return Support(kernel, variant, fp8, config)
