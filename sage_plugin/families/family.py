"""The entry of an op family, and a call of it as tools replay, judge and time it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sage_plugin.accuracy.gate import Gate
from sage_plugin.accuracy.output import CheckedOutput, ExactRows
from sage_plugin.capture.store.reader import CaptureFolder
from sage_plugin.kernels.absent_device import BuildResources
from sage_plugin.kernels.contract import Decision
from sage_plugin.schema import AnyShape, DeviceFacts, ErrorMetrics

Shape = Any
"""The record of a call's shape in its family."""

Config = Any
"""The record of a launch config in its family."""


@dataclass(frozen=True, slots=True)
class SplitCall:
    """A call of a kernel in its two parts, both with one launch config.

    Attributes:
        whole: runs both parts.
        alone: runs the main launch alone, on operands that are quantized already.
        quantizes: whether there is a first part.
        moved_bytes: bytes that the main launch must move.
    """

    whole: Callable[[], object]
    alone: Callable[[], object]
    quantizes: bool
    moved_bytes: int


class ReplayCall(Protocol):
    """A call on its device: judged as it was saved, and timed as a patched model makes it."""

    @property
    def shape(self) -> AnyShape:
        """The shape of its tensors."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its output."""

    def fingerprints(self) -> tuple[int, ...]:
        """Hash the contents."""

    def full_size(self, shape: Shape) -> ReplayCall:
        """Repeat what was saved to the full call, for timing."""

    def exact(self) -> ExactRows:
        """Compute rows of the exact output."""

    def checked(self, decision: Decision, config: Config | None, exact: ExactRows) -> CheckedOutput:
        """Run a kernel under checks, and keep the rows that `exact` has."""

    def errors(self, decision: Decision, config: Config | None) -> ErrorMetrics:
        """Judge a kernel against the exact output."""

    def whole(
        self, decision: Decision | None = None, config: Config | None = None
    ) -> Callable[[], object]:
        """Return the call as a patched model makes it; the library's own without a decision."""

    def split(self, decision: Decision, config: Config | None, facts: DeviceFacts) -> SplitCall:
        """Quantize for a kernel, and return the call in its two parts."""

    def flops(self) -> int:
        """Count its operations, with its mask."""


@dataclass(frozen=True, slots=True)
class Family:
    """One op family, as tools see it.

    Attributes:
        name: its name in manifests and its file in a device's folder of configs.
        parse_kernel: `kernel` or `kernel:variant` as names that exist.
        kernels_of: kernels that run on a device.
        automatic_kernel: the kernel that `auto` stands for on a device.
        decide: kernel and variant of a call, or why it falls back.
        call_key: the key under which a call's launch config is looked up.
        shape_of: a shape that has a key.
        default_launch: the architecture's default config of a key.
        search_space: configs to search for a key, legal or not, the default first.
        illegal_reason: why a config cannot run a key on a device, or `None`.
        find_launch: the config that the runtime would use; `None` where nothing is tuned.
        forget: drop what was looked up.
        compile_call: compile what a call would launch, in a process that stands for its device.
        gate_for: the accuracy limits of a kernel.
        captured: a capture of a folder, on a device.
        drawn: drawn values of a shape: device, seed, distribution.
        saved_shape: the shape of what a capture holds of its call.
        refuse_untuned: raise for a kernel as it was named and its decision on a device where there
            is no launch config to tune.
        describe: a shape in a few words, for tables.
        describe_key: a key in a few words.
        lines: a shape or a key on a few short lines.
        flops: operations of a call of a shape, without its mask.
    """

    name: str
    parse_kernel: Callable[[str], tuple[str, str]]
    kernels_of: Callable[[DeviceFacts], tuple[str, ...]]
    automatic_kernel: Callable[[DeviceFacts], str]
    decide: Callable[..., Decision]
    call_key: Callable[[Any, Decision], Any]
    shape_of: Callable[[Any], Any]
    default_launch: Callable[[Any, DeviceFacts], Any]
    search_space: Callable[[Any, DeviceFacts], tuple[Any, ...]]
    illegal_reason: Callable[[Any, Any, DeviceFacts], str | None]
    find_launch: Callable[..., Any]
    forget: Callable[[], None]
    compile_call: Callable[[Any, Decision, Any, DeviceFacts], tuple[BuildResources, ...]]
    gate_for: Callable[[str], Gate]
    captured: Callable[[CaptureFolder, Any, Any], ReplayCall]
    drawn: Callable[[Any, Any, int, str], ReplayCall]
    saved_shape: Callable[[Any], Any]
    refuse_untuned: Callable[[str, Decision, DeviceFacts], None]
    describe: Callable[[Any], str]
    describe_key: Callable[[Any], str]
    lines: Callable[[Any], str]
    flops: Callable[[Any], int]
