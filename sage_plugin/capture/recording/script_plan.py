"""What a script's model will run on, from the calls of its first forward; then the script ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from sage_plugin.capture.call import canonical
from sage_plugin.capture.recording.script import check_script, run_script
from sage_plugin.errors import UsageError
from sage_plugin.kernels.attention import dispatch
from sage_plugin.plugin.context import CallEvent
from sage_plugin.plugin.patch import PatchHandle
from sage_plugin.plugin.plan.run_plan import PlannedCall, RunPlan, planned


class FirstForwardEnded(BaseException):
    """Ends a script whose second forward begins; no error, so that no script catches it."""


class FirstForward:
    """Plans the calls of the first forward of each denoiser.

    Attributes:
        rows: the planned calls.
        device: name of the device that they are planned for.
    """

    def __init__(self) -> None:
        self.rows: list[PlannedCall] = []
        self.device = ""
        self._own: list[PatchHandle] = []
        self._handles: list[PatchHandle] = []
        self._seen: set[tuple[str, int]] = set()

    def attach(self, handle: PatchHandle, *, own_patch: bool = False) -> None:
        """Listen to a patched model."""
        if handle not in self._handles:
            handle.listeners.append(self._on_call)
            self._handles.append(handle)
            self._own += [handle] if own_patch else []

    def listens_to(self, model: nn.Module) -> bool:
        """Whether it does already."""
        return any(model in handle.components.values() for handle in self._handles)

    def enter_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Nothing is counted."""

    def close(self) -> None:
        """Stop listening, and undo what was patched to listen."""
        for handle in self._handles:
            if self._on_call in handle.listeners:
                handle.listeners.remove(self._on_call)
        for handle in self._own:
            handle.unpatch()

    def _on_call(self, event: CallEvent) -> None:
        place = (event.layer, event.call_index)
        if place in self._seen:
            raise FirstForwardEnded
        self._seen.add(place)
        handle = next(h for h in self._handles if event.layer in h.layers)
        options = handle.layers[event.layer].state.options
        if handle in self._own:  # it is patched with the library's own attention, to listen
            options = dataclasses.replace(options, kernel="auto", variant="auto")
        device = event.q.device
        facts = dispatch.facts_of(device.type, device.index)
        self.device = self.device or facts.name
        call = canonical(event)
        if isinstance(call, str):
            self.rows.append(PlannedCall(event.layer, None, reason=call))
        else:
            self.rows += planned(event.layer, call.shape, options, facts)


def plan_script(path: Path, args: Sequence[str] = ()) -> RunPlan:
    """Run a script until its denoiser's second forward begins, and plan the calls of the first.

    Raises:
        UsageError: there is no such script, or no attention of a model ran in it.
    """
    check_script(path)
    first = FirstForward()
    status, trace = 0, ""
    try:
        end = run_script(path, args, first)
        status, trace = end.status, end.traceback
    except FirstForwardEnded:
        pass  # what was wanted
    finally:
        first.close()
    if not first.rows:
        why = (
            f"it ended with status {status}: {trace.strip().splitlines()[-1]}"
            if trace
            else ("no attention of a diffusers or transformers model ran in it")
        )
        raise UsageError(f"{path} cannot be planned: {why}")
    return RunPlan(tuple(first.rows), first.device)
