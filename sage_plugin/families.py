"""The op families: what capture, tune, bench and the command line may ask of each one.

A family is a folder of kernels and one entry here. Tools know families only through this entry, so
that a new one brings its rooms and its row, and no tool changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sage_plugin.accuracy.gate import Gate, gate_for
from sage_plugin.errors import UsageError
from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import Decision, ResolvedConfig
from sage_plugin.schema import ATTENTION as ATTENTION_NAME
from sage_plugin.schema import CallKey, CallShape, DeviceFacts, LaunchConfig


@dataclass(frozen=True, slots=True)
class Family:
    """One op family, as tools see it.

    Attributes:
        name: its name in manifests and its file in a device's folder of configs.
        parse_kernel: `kernel` or `kernel:variant` as names that exist.
        kernels_of: kernels that run on a device.
        automatic_kernel: the kernel that `auto` stands for on a device.
        decide: kernel and variant of a call, or why it stays with the host library.
        call_key: the key under which a call's launch config is looked up.
        default_launch: the architecture's default config of a key.
        candidates: legal configs to search for a key, the default first.
        illegal_reason: why a config cannot run a key on a device, or `None`.
        find_launch: the config that the runtime would use.
        forget: drop what was looked up.
        implementation: the object that computes a kernel's variant.
        gate_for: the accuracy limits of a kernel.

    Example:
        >>> family("attention").parse_kernel("qk_int8")
        ('sage', 'auto')
    """

    name: str
    parse_kernel: Callable[[str], tuple[str, str]]
    kernels_of: Callable[[DeviceFacts], tuple[str, ...]]
    automatic_kernel: Callable[[DeviceFacts], str]
    decide: Callable[..., Decision]
    call_key: Callable[[CallShape, Decision], CallKey]
    default_launch: Callable[[CallKey, DeviceFacts], LaunchConfig]
    candidates: Callable[[CallKey, DeviceFacts], tuple[LaunchConfig, ...]]
    illegal_reason: Callable[[LaunchConfig, CallKey, DeviceFacts], str | None]
    find_launch: Callable[..., ResolvedConfig]
    forget: Callable[[], None]
    implementation: Callable[..., Any]
    gate_for: Callable[[str], Gate]


ATTENTION = Family(
    name=ATTENTION_NAME,
    parse_kernel=dispatch.parse_kernel,
    kernels_of=dispatch.kernels_of,
    automatic_kernel=dispatch.automatic_kernel,
    decide=dispatch.decide,
    call_key=dispatch.call_key,
    default_launch=dispatch.default_launch,
    candidates=dispatch.candidates,
    illegal_reason=dispatch.illegal_reason,
    find_launch=dispatch.find_launch,
    forget=dispatch.forget,
    implementation=implementation,
    gate_for=gate_for,
)

_FAMILIES = {one.name: one for one in (ATTENTION,)}


def family(name: str) -> Family:
    """Return the family of a name.

    Raises:
        UsageError: there is none.
    """
    if name not in _FAMILIES:
        raise UsageError(f"op family {name!r} is not known: choose one of {', '.join(_FAMILIES)}")
    return _FAMILIES[name]
