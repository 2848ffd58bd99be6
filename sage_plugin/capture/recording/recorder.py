"""Records the real inputs of operations: `with record(pipe, "captured_inputs"): pipe(...)`."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from sage_plugin.capture.ops.op import Listening, OpEvent
from sage_plugin.capture.record import CaptureRecord
from sage_plugin.capture.recording.intake import Intake
from sage_plugin.capture.recording.summary import CaptureSummary
from sage_plugin.capture.selection.options import (
    DEFAULT_MAX_BYTES,
    MIN_SEQ,
    ROWS,
    CaptureOptions,
)
from sage_plugin.errors import OutputError, UsageError
from sage_plugin.plugin.component import Component, component_of
from sage_plugin.plugin.context import WRAPPER
from sage_plugin.plugin.patch import PatchHandle, handle_of, patch
from sage_plugin.plugin.steps.forward import Forward, ForwardCounter, Timestep
from sage_plugin.schema import ATTENTION

logger = logging.getLogger(__name__)

HOST_KERNEL = "sdpa"
"""What an unpatched model is patched with while it is recorded: its own attention."""

_COUNTS_EVERY_S = 10.0
_MOST_STEPS = 100_000


class CaptureRecorder:
    """Listens to patched models and saves a spread of their calls; made by `record`.

    Args:
        folder: the capture folder.
        options: what to save.
        target: a pipeline or model to observe, patched or not; `None` if that follows.
        on_save: called after each capture, those that a better one replaces later included.

    Raises:
        UsageError: an option is out of range.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        options: CaptureOptions,
        *,
        target: object = None,
        on_save: Callable[[CaptureRecord], None] | None = None,
    ) -> None:
        self._intake = Intake(Path(folder), options, on_save=on_save)
        self._target = target
        self._attached: list[tuple[PatchHandle, bool]] = []
        self._listening: dict[Component, list[Listening]] = {}
        self._watches: dict[str, ForwardWatch] = {}
        self._step_hint: Callable[[], int | None] | None = None
        self._open = False
        self._counted_at = time.monotonic()
        self._lock = threading.RLock()

    def open(self) -> None:
        """Make the folder ready, and observe the target if there is one.

        Raises:
            CaptureError: the folder holds other files, or captures that may not be replaced.
            OutputError: the folder cannot be written.
            UsageError: what `observe` raises.
        """
        self._intake.open()
        self._open = True
        if self._target is not None:
            try:
                self.observe(self._target)
            except BaseException:
                self.close()
                raise

    def observe(self, obj: object) -> None:
        """Record from a pipeline or model until `close`; an unpatched one is patched as it runs.

        Raises:
            PatchError: it has no attention that can be patched.
            UsageError: no layer matches the globs.
        """
        former = handle_of(obj)
        handle = patch(obj, kernel=HOST_KERNEL) if former is None else former
        try:
            names = self._layers(handle)
            self._intake.check_layers([name for found in names.values() for name in found])
        except UsageError:
            if former is None:
                handle.unpatch()
            raise
        self.attach(handle, own_patch=former is None)
        if not isinstance(obj, nn.Module):
            self._step_hint = partial(_announced_steps, obj)
            self._intake.denoising.follow(obj)
        if _is_compiled(obj):
            logger.warning(
                "the model runs under torch.compile, which hides calls from a recording; record it "
                "before compiling"
            )

    def attach(self, handle: PatchHandle, *, own_patch: bool = False) -> None:
        """Listen to a patched model until `close`; again takes up what was patched since.

        Args:
            handle: what `patch` returned.
            own_patch: undo the patch at the end.
        """
        if all(handle is not known for known, _ in self._attached):
            self._attached.append((handle, own_patch))
        for name, model in handle.components.items():
            self._watch(name, model)
            part = component_of(model)
            if part is not None and part not in self._listening:
                ops = self._intake.ops.values()
                self._listening[part] = [w for op in ops for w in op.watch(part, self._on_call)]
        for family, names in self._layers(handle).items():
            self._intake.add_layers(family, names)
        if len(self._watches) > 1:
            self._intake.expect(None)  # who runs which part of the steps is not known

    def listens_to(self, model: nn.Module) -> bool:
        """Whether a component's forwards are counted and its handle is attached."""
        handle = handle_of(model)
        return any(handle is known for known, _ in self._attached) and any(
            watch.counter.model is model for watch in self._watches.values()
        )

    def enter_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Count a forward that had begun when its model was attached."""
        for watch in self._watches.values():
            if watch.counter.model is model:
                watch.counter.begin(model, args, kwargs)

    def close(self) -> None:
        """Stop listening, write the counts, undo an own patch; again does nothing.

        Raises:
            OutputError: something could not be written; recording stopped there, the model went on.
        """
        for watch in self._watches.values():
            watch.stop()
        self._intake.denoising.tracker.stop()
        for listening in self._listening.values():
            for one in listening:
                one.remove()
        self._listening.clear()
        for handle, own_patch in self._attached:
            if own_patch and _still_host(handle):
                handle.unpatch()
        self._attached.clear()
        if self._open:
            self._open = False
            self._intake.close(self._steps())

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except OutputError:
            if error is None:
                raise
            logger.exception("the recording stopped early")
        if error is None and not self.summary.files:
            logger.warning("nothing was recorded: %s", self.summary.why_nothing())

    @property
    def summary(self) -> CaptureSummary:
        """What was seen and saved until now."""
        with self._lock:
            return self._intake.summary(self._steps())

    def _on_forward(self, forward: Forward) -> None:
        with self._lock:
            self._intake.denoising.forward(forward)
            if self._step_hint is not None and self._intake.total_steps is None:
                self._intake.expect(self._step_hint() if len(self._watches) == 1 else None)
            self._step_hint = None
            if self._open and time.monotonic() - self._counted_at > _COUNTS_EVERY_S:
                self._write_counts()

    def _layers(self, handle: PatchHandle) -> dict[str, list[str]]:
        """Names of a handle's layers by op family."""
        parts = [part for model in handle.components.values() if (part := component_of(model))]
        return {
            family: [name for part in parts for name in op.layers(part)]
            for family, op in self._intake.ops.items()
        }

    def _on_call(self, event: OpEvent) -> None:
        """Count one call, and save it if it is wanted; the patched layer calls this."""
        with self._lock:
            if not self._open:
                return
            watch = self._watches.get(event.component) or next(iter(self._watches.values()))
            if self._intake.take(watch.forward(), event):
                self._write_counts()

    def _write_counts(self) -> None:
        self._counted_at = time.monotonic()
        self._intake.write_counts(self._steps())

    def _steps(self) -> dict[str, int]:
        return {name: watch.count for name, watch in self._watches.items()}

    def _watch(self, name: str, model: nn.Module) -> None:
        """Count the forwards of a component; another model of the same name goes on counting."""
        part, former = component_of(model), self._watches.get(name)
        if part is None or (former is not None and former.counter is part.state.forwards):
            return
        if former is not None:
            former.stop()
        first = 0 if former is None else former.count
        self._watches[name] = ForwardWatch(model, part.state.forwards, self._on_forward, first)


class ForwardWatch:
    """The forwards of one component since its recording began.

    Args:
        model: the component.
        counter: counts them since it was patched.
        on_begin: called at the start of each.
        count: how many were recorded before.
    """

    def __init__(
        self,
        model: nn.Module,
        counter: ForwardCounter,
        on_begin: Callable[[Forward], None],
        count: int = 0,
    ) -> None:
        self.counter = counter
        self.count = count
        self._on_begin = on_begin
        self._last = Forward(model, count, Timestep(None))
        counter.listeners.append(self._begin)

    def forward(self) -> Forward:
        """The current forward, by its index in the recording."""
        return self._last

    def stop(self) -> None:
        """Watch no more."""
        if self._begin in self.counter.listeners:
            self.counter.listeners.remove(self._begin)

    def _begin(self, forward: Forward) -> None:
        self._last = dataclasses.replace(forward, index=self.count)
        self.count += 1
        self._on_begin(forward)


def record(
    obj: object,
    folder: str | os.PathLike[str] = "captured_inputs",
    *,
    max_captures: int = 10,
    layers: str | Iterable[str] = "*",
    steps: str | int | Iterable[int] | None = None,
    every: int = 1,
    per_shape: int | None = None,
    heads: int | str | Iterable[int] | None = None,
    batch: str | Iterable[int] | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    total_steps: int | None = None,
    min_seq: int = MIN_SEQ,
    overwrite: bool = False,
    ops: str | Iterable[str] = (ATTENTION,),
    rows: int = ROWS,
    on_save: Callable[[CaptureRecord], None] | None = None,
) -> CaptureRecorder:
    """Record inputs of attention and linears of a pipeline or model while a `with` block runs.

    A patched model is recorded as it is; any other runs its own attention and is left as it was.
    The captures spread over layers and denoising steps, every shape gets one before any gets two,
    and `sage tune --from-captures` reads them.

    Args:
        obj: a diffusers pipeline, its denoiser, or a patched module.
        folder: where the captures go; new, empty, or (with `overwrite`) a capture folder.
        max_captures: most captures of each op family in the folder, at any time.
        layers: globs of layer paths, e.g. `"transformer.transformer_blocks.[0-4].*"`.
        steps: denoising steps, as numbers or as text such as `"0,5,10-14"`; all if `None`.
        every: of the steps, only those that it divides: 2 is every second one.
        per_shape: most captures of calls of one shape; as many as come if `None`.
        heads: number of key heads of a capture, or their indices (`[0, 5]`, `"0,5,8-11"`); all that
            fit if `None`.
        batch: indices of batch items; all that fit if `None`.
        max_bytes: most bytes of the folder.
        total_steps: number of denoising steps; asked of the pipeline if `None`.
        min_seq: calls with fewer queries or keys, or rows, are counted and not saved.
        overwrite: replace the captures that the folder holds.
        ops: op families to record: `"attention"`, `"linear"` or `"attention,linear"`. Of a linear
            in the blocks rows of its input are saved, and its weight once. `"grouped_linear"` are
            the products of experts, `"paged_attention"` calls that read pages while the block runs.
        rows: most rows of a linear's input, or of queries over pages, spread evenly over the call.
        on_save: called with the manifest line of each capture.

    Returns:
        A context manager; its `summary` says what was seen and saved.

    Raises:
        PatchError: `obj` is neither a pipeline nor a module.
        UsageError: an option is out of range. Entering the result raises what
            `CaptureRecorder.open` does, and leaving it `OutputError` if the disk did not take
            everything.

    Example:
        >>> import tempfile, torch, sage_plugin
        >>> from diffusers.models.attention_processor import Attention
        >>> model = torch.nn.ModuleDict({"attn": Attention(query_dim=8, heads=2, dim_head=4)})
        >>> with sage_plugin.record(model, f"{tempfile.mkdtemp()}/captures") as recorder:
        ...     out = model["attn"](torch.ones(1, 4, 8))
        >>> recorder.summary.files
        1
    """
    options = CaptureOptions(
        max_captures, layers, steps, every, per_shape, heads, batch, max_bytes, total_steps,
        min_seq, overwrite, ops, rows,
    )  # fmt: skip
    handle_of(obj)  # refuses what can hold no attention
    return CaptureRecorder(folder, options, target=obj, on_save=on_save)


def _still_host(handle: PatchHandle) -> bool:
    """Whether nobody asked for a kernel since we patched."""
    return all(layer.state.options.kernel == HOST_KERNEL for layer in handle.layers.values())


def _announced_steps(pipe: object) -> int | None:
    """The number of denoising steps that a running pipeline has set up."""
    steps = getattr(pipe, "num_timesteps", None)
    if not isinstance(steps, int):
        timesteps = getattr(getattr(pipe, "scheduler", None), "timesteps", None)
        steps = len(timesteps) if isinstance(timesteps, torch.Tensor) else None
    return steps if steps is not None and 0 < steps <= _MOST_STEPS else None


def _is_compiled(obj: object) -> bool:
    """Whether a model, a pipeline's component, or a part of one was handed to `torch.compile`."""
    parts = [obj] if isinstance(obj, nn.Module) else list(getattr(obj, "components", {}).values())
    return any(
        module._compiled_call_impl is not None or WRAPPER in module._modules
        for part in parts
        if isinstance(part, nn.Module)
        for module in part.modules()
    )
