"""The entry of an op family, and a call of it as tools replay, judge and time it."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sage_plugin.accuracy.fingerprint import fingerprint
from sage_plugin.accuracy.gate import Gate
from sage_plugin.accuracy.metrics import errors_of
from sage_plugin.accuracy.output import CheckedOutput, ExactRows, checked_output
from sage_plugin.capture.store.reader import CaptureFolder
from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.absent_device import BuildResources, resources
from sage_plugin.kernels.contract import Decision, ResolvedConfig
from sage_plugin.kernels.launch_config import LaunchRules
from sage_plugin.schema import DeviceFacts, ErrorMetrics

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


class ReplayCall(ABC):
    """A call on its device: judged as it was saved, and timed as a patched model makes it.

    Attributes:
        shape: the shape of its tensors.
    """

    __slots__ = ()
    shape: Any

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of its output."""

    @abstractmethod
    def inputs(self) -> dict[str, torch.Tensor]:
        """Name its tensors."""

    @abstractmethod
    def full_size(self, shape: Shape) -> ReplayCall:
        """Repeat what was saved to the full call, for timing."""

    @abstractmethod
    def exact(self, rows: torch.Tensor | None = None) -> ExactRows:
        """Compute rows of the exact output, sampled ones by default."""

    @abstractmethod
    def output(self, decision: Decision, config: Config | None, dtype: torch.dtype) -> torch.Tensor:
        """Run a kernel as `linear` and the like do, and return its output as it is judged."""

    @abstractmethod
    def judged_size(self) -> tuple[int, ...]:
        """Return the shape of the output as it is judged: heads or blocks come before rows."""

    @abstractmethod
    def whole(
        self, decision: Decision | None = None, config: Config | None = None
    ) -> Callable[[], object]:
        """Return the call as a patched model makes it; the library's own without a decision."""

    @abstractmethod
    def split(self, decision: Decision, config: Config | None, facts: DeviceFacts) -> SplitCall:
        """Quantize for a kernel, and return the call in its two parts."""

    @abstractmethod
    def flops(self) -> int:
        """Count its operations, with its mask."""

    def fingerprints(self) -> tuple[int, ...]:
        """Hash the contents."""
        return tuple(fingerprint(part) for part in self.inputs().values())

    def checked(self, decision: Decision, config: Config | None, exact: ExactRows) -> CheckedOutput:
        """Run a kernel under checks, and keep the rows that `exact` has."""
        run = functools.partial(self.output, decision, config)
        return checked_output(run, self.inputs(), exact, size=self.judged_size(), dtype=self.dtype)

    def errors(
        self, decision: Decision, config: Config | None, rows: torch.Tensor | None = None
    ) -> ErrorMetrics:
        """Judge a kernel against the exact output, on sampled rows of every head or block.

        The metrics are those of the result before its last rounding; NaN and infinite values are
        counted over all rows of both that result and the one in the dtype of the call.
        """
        exact = self.exact(rows)
        return errors_of(self.checked(decision, config, exact), exact, dtype=self.dtype)


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
        launches: its launch configs.
        launch_all: make the launches of a call of a shape, on tensors that are never written.
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
        weight_values: numbers of the weights of a shape, which a replay quantizes before its calls.
        tuned: the one backend whose launch configs are tuned; `None` for all.
    """

    name: str
    parse_kernel: Callable[[str], tuple[str, str]]
    kernels_of: Callable[[DeviceFacts], tuple[str, ...]]
    automatic_kernel: Callable[[DeviceFacts], str]
    decide: Callable[..., Decision]
    call_key: Callable[[Any, Decision], Any]
    shape_of: Callable[[Any], Any]
    launches: LaunchRules
    launch_all: Callable[[Any, Decision, Any, DeviceFacts], object]
    gate_for: Callable[[str], Gate]
    captured: Callable[[CaptureFolder, Any, Any], ReplayCall]
    drawn: Callable[[Any, Any, int, str], ReplayCall]
    saved_shape: Callable[[Any], Any]
    refuse_untuned: Callable[[str, Decision, DeviceFacts], None]
    describe: Callable[[Any], str]
    describe_key: Callable[[Any], str]
    lines: Callable[[Any], str]
    flops: Callable[[Any], int]
    weight_values: Callable[[Any], int] = lambda shape: 0
    tuned: str | None = None

    def default_launch(self, key: Any, facts: DeviceFacts) -> Any:  # noqa: ANN401
        """Return the architecture's default config of a key."""
        return self.launches.default(key, facts)

    def search_space(self, key: Any, facts: DeviceFacts) -> tuple[Any, ...]:  # noqa: ANN401
        """Return the configs to search for a key, legal or not, the default first."""
        return self.launches.search(key, facts)

    def illegal_reason(self, config: Config, key: Any, facts: DeviceFacts) -> str | None:  # noqa: ANN401
        """Return why a config cannot run a key on a device, or `None`."""
        return self.launches.illegal_reason(config, key, facts)

    def find_launch(
        self,
        key: Any,  # noqa: ANN401
        facts: DeviceFacts,
        *,
        config_dir: str | None = None,
    ) -> ResolvedConfig | None:
        """Return the config that the runtime would use; `None` where nothing is tuned."""
        if self.tuned not in (None, key.variant):
            return None
        return self.launches.find(key, facts, config_dir=config_dir)

    def compile_call(
        self, shape: Shape, decision: Decision, config: Config, facts: DeviceFacts
    ) -> tuple[BuildResources, ...]:
        """Compile the launches of a call for the device that this process stands for.

        Nothing runs: tensors are of the call's size and are never written, so that they take no
        memory.

        Returns:
            What each kernel takes; nothing for what launches none of ours.

        Raises:
            Exception: whatever the compiler raises where it refuses.
        """
        if self.tuned not in (None, decision.variant):
            return ()
        with launch_graph.recording(only_compile=True) as recorder:
            self.launch_all(shape, decision, config, facts)
        return tuple(resources(launch[-1]) for launch in recorder.launches)
