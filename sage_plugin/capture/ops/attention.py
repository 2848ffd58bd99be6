"""How calls of attention are recorded: the handle of the patch tells of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sage_plugin.capture.call import CanonicalCall, canonical
from sage_plugin.capture.ops.op import Extracted, Listener, Listening
from sage_plugin.capture.record import AttentionCapture
from sage_plugin.capture.selection.extract import extract
from sage_plugin.capture.selection.heads import Part
from sage_plugin.capture.selection.options import CaptureOptions
from sage_plugin.plugin.component import Component
from sage_plugin.plugin.context import CallEvent
from sage_plugin.plugin.steps.forward import Forward
from sage_plugin.schema import CallShape


@dataclass(frozen=True, slots=True)
class HandleListener:
    """A listener among those of a handle."""

    listeners: list[Listener]
    listener: Listener

    def remove(self) -> None:
        """Listen no more."""
        if self.listener in self.listeners:
            self.listeners.remove(self.listener)


class AttentionOp:
    """Attention, as `capture.ops.op.CapturedOp`."""

    record = AttentionCapture
    layers_word = "attention layers"
    short = "queries or keys"

    def layers(self, part: Component) -> list[str]:
        """Return the names of the patched layers."""
        return [layer.name for layer in part.layers.values()]

    def watch(self, part: Component, listener: Listener) -> Iterable[Listening]:
        """Listen to the handle that the component belongs to, once."""
        listeners = part.handle.listeners
        if listener in listeners:
            return ()
        listeners.append(listener)
        return (HandleListener(listeners, listener),)

    def canonical(self, event: CallEvent) -> CanonicalCall | str:
        """Return the call in canonical form, or the reason why it cannot be recorded."""
        return canonical(event)

    def length(self, call: CanonicalCall) -> int:
        """Return the shorter one of queries and keys."""
        return min(call.shape.seq_q, call.shape.seq_k)

    def counted(self, call: CanonicalCall) -> CallShape:
        """Return its shape."""
        return call.shape

    def chooser(self, options: CaptureOptions) -> Callable[[CanonicalCall], Part | str]:
        """Return what chooses heads and batch items."""
        return options.rule().choose

    def extract(
        self, event: CallEvent, call: CanonicalCall, part: Part, forward: Forward
    ) -> Extracted:
        """Copy heads and batch items to host memory."""
        fields = {
            "batch_indices": part.batch,
            "head_indices": part.heads,
            "strides_q": event.q.stride(),
            "strides_k": event.k.stride(),
            "strides_v": event.v.stride(),
            "text_length": forward.text_length,
        }
        return Extracted(extract(call, part), fields)
