"""Takes calls in: counts each, decides on it, and saves those that are wanted."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from sage_plugin.capture.ops import OPS
from sage_plugin.capture.ops.op import (
    GRAPH_CAPTURE,
    CapturedOp,
    Extracted,
    OpCall,
    OpEvent,
    in_graph_capture,
)
from sage_plugin.capture.record import CaptureRecord
from sage_plugin.capture.recording.origin import Origin, origin_of
from sage_plugin.capture.recording.run_steps import RunSteps
from sage_plugin.capture.recording.summary import CaptureSummary
from sage_plugin.capture.recording.tally import Tally
from sage_plugin.capture.selection.options import CaptureOptions
from sage_plugin.capture.selection.spread import CaptureCell
from sage_plugin.capture.store.manifest import CallCounts
from sage_plugin.capture.store.writer import CaptureWriter
from sage_plugin.errors import OutputError, UsageError
from sage_plugin.plugin.steps.forward import Forward
from sage_plugin.schema import SCHEMA_VERSION

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = "the device had no memory left for the copy"
OUTPUT_FAILED = "the output could not be written"
REPLACED = "replaced by a call that makes the spread more even"


class Intake:
    """The part of a recording that sees calls and no models.

    Args:
        folder: the capture folder.
        options: what to save.
        on_save: called after each capture.
    """

    def __init__(
        self,
        folder: Path,
        options: CaptureOptions,
        *,
        on_save: Callable[[CaptureRecord], None] | None = None,
    ) -> None:
        self.ops = {name: OPS[name] for name in options.ops}
        self.denoising = RunSteps()
        self._policies = {name: options.policy() for name in self.ops}
        self._choosers = {name: op.chooser(options) for name, op in self.ops.items()}
        self._globs = options.globs()
        self._filters = f"layers {', '.join(self._globs)!r}, steps {options.steps or 'all'}"
        self._min_seq = options.min_seq
        self._writer = CaptureWriter(folder, overwrite=options.overwrite)
        self._on_save = on_save
        self._tally = Tally()
        self._saved: dict[CaptureCell, CaptureRecord] = {}
        self._selected: dict[str, bool] = {}
        self._origins: dict[nn.Module, Origin] = {}
        self._failure: OutputError | None = None
        self._graph_warned = False

    def check_layers(self, layers: Sequence[str]) -> None:
        """See that the globs select something.

        Raises:
            UsageError: they match none of these layers.
        """
        if not any(map(self._selects, layers)):
            shown = ", ".join(layers[:5]) + (", ..." if len(layers) > 5 else "")
            what = " and ".join(op.layers_word for op in self.ops.values())
            raise UsageError(
                f"layers {', '.join(self._globs)!r} match none of {len(layers)} {what}: {shown}"
            )

    def add_layers(self, family: str, layers: Iterable[str]) -> None:
        """Make layers known; those that the globs leave out are counted only."""
        self._policies[family].add_layers(filter(self._selects, layers))

    @property
    def total_steps(self) -> int | None:
        """The announced number of steps."""
        return next(iter(self._policies.values())).total_steps

    def expect(self, total_steps: int | None) -> None:
        """Announce how many steps the run has."""
        for policy in self._policies.values():
            policy.expect(total_steps)

    def open(self) -> None:
        """Make the folder ready; raises what `CaptureWriter.open` does."""
        self._writer.open()

    def take(self, forward: Forward, event: OpEvent) -> bool:
        """Count a call and save it if it is wanted; whether it was saved."""
        reason = self._consider(forward, event)
        self._tally.add(event.layer, reason, event.family)
        return not reason

    def summary(self, steps: Mapping[str, int]) -> CaptureSummary:
        """What was seen and saved until now."""
        records = self._writer.records
        counts = self._counts(steps, complete=False)
        return CaptureSummary(
            folder=self._writer.folder,
            files=len(records),
            bytes=self._writer.total_bytes,
            calls_seen=counts.total,
            layers=counts.layers,
            steps=counts.steps,
            layers_saved=tuple(dict.fromkeys(r.layer for r in records)),
            steps_saved=tuple(sorted({r.step for r in records})),
            partial=sum(record.is_partial for record in records),
            skipped=counts.skipped,
            filters=self._filters,
            ops=tuple(self.ops),
        )

    def write_counts(self, steps: Mapping[str, int]) -> None:
        """Write the running counts, which survive a run that is killed."""
        with self._output():
            self._writer.write_counts(self._counts(steps, complete=False))

    def close(self, steps: Mapping[str, int]) -> None:
        """Write the final counts.

        Raises:
            OutputError: something could not be written, now or before.
        """
        with self._output():
            self._writer.close(self._counts(steps, complete=self._failure is None))
        if self._failure is not None:
            raise self._failure

    def _counts(self, steps: Mapping[str, int], *, complete: bool) -> CallCounts:
        return self._tally.counts(steps, self.denoising, complete=complete)

    def _consider(self, forward: Forward, event: OpEvent) -> str:
        """Save a call, or say why not."""
        op, policy = self.ops[event.family], self._policies[event.family]
        call = op.canonical(event)
        if isinstance(call, str):
            return call
        shape = op.counted(call)
        self._tally.add_shape(shape)
        short = op.length(call) < self._min_seq
        if not short:
            self._tally.add_cell(event.layer, shape, self.denoising.step)
        # No news, but where a model was patched again.
        self.add_layers(event.family, [event.layer])
        cell = CaptureCell(event.layer, forward.index, event.call_index)
        reason = policy.refusal(cell) or self._obstacle(op, short=short)
        part = reason or self._choosers[event.family](call)
        if isinstance(part, str):
            return part
        verdict = policy.judge(cell, shape)
        if not verdict.keep:
            return verdict.reason
        try:
            got = op.extract(event, call, part, forward)
        except torch.OutOfMemoryError:
            return OUT_OF_MEMORY
        with self._output():
            if verdict.evict is not None:
                self._writer.delete(self._saved.pop(verdict.evict))
                self._tally.skipped[REPLACED] += 1
            record = self._record(forward, event, cell, call, got)
            self._saved[cell] = self._writer.save(got.tensors, record, got.weight)
            policy.commit(cell, verdict, shape)
            if self._on_save is not None:
                self._on_save(self._saved[cell])
        return "" if self._failure is None else OUTPUT_FAILED

    def _obstacle(self, op: CapturedOp, *, short: bool) -> str:
        if self._failure is not None:
            return OUTPUT_FAILED
        if short:
            return f"fewer than {self._min_seq} {op.short}"
        if in_graph_capture():
            if not self._graph_warned:
                logger.warning("calls inside a CUDA graph capture are not recorded")
            self._graph_warned = True
            return GRAPH_CAPTURE
        return ""

    def _record(
        self,
        forward: Forward,
        event: OpEvent,
        cell: CaptureCell,
        call: OpCall,
        got: Extracted,
    ) -> CaptureRecord:
        """The manifest line, but for file and checksum."""
        origin = self._origins.get(forward.model) or origin_of(forward.model)
        self._origins[forward.model] = origin
        return self.ops[event.family].record(
            schema_version=SCHEMA_VERSION,
            family=event.family,
            file="",
            layer=cell.layer,
            step=cell.step,
            timestep=forward.timestep,
            call_index=cell.call_index,
            shape=call.shape,
            model_class=origin.model_class,
            config_hash=origin.config_hash,
            versions=origin.versions,
            sha256="",
            denoising_step=self.denoising.step,
            **got.fields,
        )

    def _selects(self, layer: str) -> bool:
        if layer not in self._selected:
            self._selected[layer] = any(fnmatchcase(layer, glob) for glob in self._globs)
        return self._selected[layer]

    @contextlib.contextmanager
    def _output(self) -> Iterator[None]:
        """Remember the first failure to write: it ends the recording, not the model's run."""
        try:
            yield
        except OutputError as error:
            if self._failure is None:
                self._failure = error
                logger.error("recording stops: %s", error)
