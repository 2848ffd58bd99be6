"""What a recording came to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sage_plugin.schema import ATTENTION

_COMPILED = "torch.compile hides calls from a recording: where it is used, leave it out"


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """What a recording saw and saved.

    Attributes:
        folder: where the captures are.
        files: captures that are saved.
        bytes: size of their files.
        calls_seen: calls, saved or not.
        layers: calls by layer.
        steps: forwards by component.
        layers_saved: layers with a capture.
        steps_saved: steps with a capture.
        partial: captures that hold only a part of their call.
        skipped: calls that are in no capture, by reason.
        filters: the layers and steps that were asked for.
        ops: the op families that were recorded.
    """

    folder: Path
    files: int
    bytes: int
    calls_seen: int
    layers: dict[str, int]
    steps: dict[str, int]
    layers_saved: tuple[str, ...]
    steps_saved: tuple[int, ...]
    partial: int
    skipped: dict[str, int]
    filters: str
    ops: tuple[str, ...] = (ATTENTION,)

    @property
    def words(self) -> str:
        """What the calls are called."""
        return " and ".join(self.ops)

    def why_nothing(self) -> str:
        """One sentence on why no call was saved: what was seen, and what kept it out."""
        if not self.steps:
            return (
                f"no {self.words} of a diffusers or transformers model ran in this process (models "
                "in subprocesses, behind torch.compile or with attention of their own are not seen)"
            )
        forwards = ", ".join(f"{n} forwards of {name}" for name, n in self.steps.items())
        if not self.calls_seen:
            return f"{forwards}, but no {self.words} call was seen in eager mode; {_COMPILED}"
        reasons = "; ".join(f"{n} x {reason}" for reason, n in self.skipped.items())
        names = list(self.layers)
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return (
            f"{self.calls_seen} {self.words} calls of {len(names)} layers ({shown}) in {forwards} "
            f"were seen, and none was saved: {reasons} ({self.filters})"
        )
