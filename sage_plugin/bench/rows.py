"""The records of a comparison: one row per kernel and input, one table per input."""

from __future__ import annotations

from dataclasses import dataclass

from sage_plugin.bench.difference import OutputDifference
from sage_plugin.measure.clocks import ClockSnapshot
from sage_plugin.schema import AnyLaunch, AnyShape, ErrorMetrics, JsonRecord, Timing

EMULATION_NOTE = "emulation: not a speed"


@dataclass(frozen=True, slots=True)
class KernelRow(JsonRecord):
    """One kernel on one input; every number of speed comes from the one timing `time`.

    Attributes:
        input: name of the input.
        source: `capture`, or `synthetic:` and the distribution.
        input_sha256: checksum of the capture's file, or empty.
        shape: the timed call.
        kernel: kernel name.
        variant: variant name.
        config: launch config, `None` where nothing is tuned.
        config_source: where the config came from, e.g. `exact` or `default`.
        time: time of the call with quantisation.
        kernel_time: time of the main launch alone; `None` where nothing is quantised.
        flops: operations of the call.
        moved_bytes: bytes that the main launch must move.
        errors: against the oracle.
        reference: kernel that is compared with, or empty.
        reference_errors: against that kernel's output.
        speedup: time of the reference over the time of this kernel, from paired samples; likewise
            the ends of its 95 % interval.
        gate: a sentence for each accuracy limit that is broken.
        stamp: `clean`, `noisy` or `throttled`.
        note: what forbids to read the times as speed, or empty.
        difference: plain statistics, where asked for.
    """

    input: str
    source: str
    input_sha256: str
    shape: AnyShape
    kernel: str
    variant: str
    config: AnyLaunch | None
    config_source: str
    time: Timing
    kernel_time: Timing | None
    flops: int
    moved_bytes: int
    errors: ErrorMetrics
    reference: str
    reference_errors: ErrorMetrics | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    gate: tuple[str, ...]
    stamp: str
    note: str
    difference: OutputDifference | None = None

    @property
    def label(self) -> str:
        """`kernel:variant`."""
        return f"{self.kernel}:{self.variant}"

    @property
    def tflops(self) -> float:
        """10^12 operations per second."""
        return self.flops / self.time.median_ms * 1e-9

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes per second."""
        return self.moved_bytes / self.time.median_ms * 1e-6

    @property
    def flop_per_byte(self) -> float:
        """Arithmetic intensity."""
        return self.flops / self.moved_bytes


@dataclass(frozen=True, slots=True)
class Table:
    """All kernels on one input, timed interleaved in one measurement.

    Attributes:
        input: name of the input.
        shape: the timed call.
        rows: one per kernel.
        stamp: `clean`, `noisy` or `throttled`.
        aa_ratio: time of the first kernel over the time of itself; `None` where not taken.
        before: clocks before the timing, `None` on a CPU or where unknown.
        after: clocks after it.
        failed: a sentence for each kernel that could not run this input.
    """

    input: str
    shape: AnyShape
    rows: tuple[KernelRow, ...]
    stamp: str
    aa_ratio: float | None
    before: ClockSnapshot | None
    after: ClockSnapshot | None
    failed: tuple[str, ...] = ()
