"""What a recording asks of an op family."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from sage_plugin.capture.record import CaptureRecord
from sage_plugin.capture.selection.options import CaptureOptions
from sage_plugin.plugin.component import Component
from sage_plugin.plugin.steps.forward import Forward
from sage_plugin.schema import AnyShape

GRAPH_CAPTURE = "CUDA graph capture was running"
"""Why a call cannot be recorded whose contents do not exist yet."""


def in_graph_capture() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class OpEvent(Protocol):
    """A call of a patched component that is about to run."""

    @property
    def family(self) -> str:
        """Op family."""

    @property
    def component(self) -> str:
        """Name of the component, e.g. `"transformer"`."""

    @property
    def layer(self) -> str:
        """Module path, with the component in front."""

    @property
    def call_index(self) -> int:
        """Which call of the layer in the current forward, from 0."""


class OpCall(Protocol):
    """The same call in canonical form."""

    @property
    def shape(self) -> AnyShape:
        """The full call."""


class Listening(Protocol):
    """A listener in its place."""

    def remove(self) -> None:
        """Listen no more."""


Listener = Callable[[Any], None]
"""Takes an event."""


@dataclass(frozen=True, slots=True)
class Extracted:
    """What is saved of a call, in host memory.

    Attributes:
        tensors: by name, contiguous.
        fields: those of its record that belong to the family.
        weight: what its record's second file holds; `None` where it has none.
    """

    tensors: dict[str, torch.Tensor]
    fields: dict[str, Any] = field(default_factory=dict)
    weight: torch.Tensor | None = None


class CapturedOp(Protocol):
    """One op family, as a recording sees it."""

    @property
    def record(self) -> type[CaptureRecord]:
        """Its manifest lines."""

    @property
    def layers_word(self) -> str:
        """What its layers are called."""

    @property
    def short(self) -> str:
        """What calls have fewer of than makes them worth saving."""

    def layers(self, part: Component) -> list[str]:
        """Return the names of a patched component's layers, in the model's order."""

    def watch(self, part: Component, listener: Listener) -> Iterable[Listening]:
        """Call a listener before each call of a component's layers, in eager mode."""

    def canonical(self, event: Any) -> OpCall | str:  # noqa: ANN401
        """Return the call in canonical form, or the reason why it cannot be recorded."""

    def length(self, call: Any) -> int:  # noqa: ANN401
        """Return what `min_seq` is compared with."""

    def counted(self, call: Any) -> AnyShape:  # noqa: ANN401
        """Return the shape that a call counts as one of, where its own is like no other's."""

    def chooser(self, options: CaptureOptions) -> Callable[[Any], Any]:
        """Return what chooses the part of a call to save, or gives the reason why none can be."""

    def extract(self, event: Any, call: Any, part: Any, forward: Forward) -> Extracted:  # noqa: ANN401
        """Copy a part of a call to host memory."""
