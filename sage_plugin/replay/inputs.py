"""One input of a replay, a capture on disk or numbers to be drawn, and how it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sage_plugin.capture.record import CaptureRecord
from sage_plugin.capture.store.reader import CaptureFolder
from sage_plugin.families import Family, family
from sage_plugin.families.family import ReplayCall, Shape

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplayInputs:
    """The tensors of one call before they are loaded.

    Attributes:
        shape: the full call.
        name: what reports call it.
        folder: the capture folder, empty for drawn values.
        record: the capture's manifest line, `None` for drawn values.
        distribution: of drawn values, a name of `measure.inputs.DISTRIBUTIONS`.
        seed: of drawn values.
    """

    shape: Shape
    name: str = ""
    folder: str = ""
    record: CaptureRecord | None = None
    distribution: str = "normal"
    seed: int = 0

    @property
    def synthetic(self) -> bool:
        """Whether the values are drawn, not recorded."""
        return self.record is None

    @property
    def source(self) -> str:
        """`capture`, or `synthetic:` and the distribution."""
        return f"synthetic:{self.distribution}" if self.record is None else "capture"

    @property
    def label(self) -> str:
        """What evidence lists: `sha256:...` of a capture, `synthetic:<distribution>:<seed>`."""
        return f"{self.source}:{self.seed}" if self.record is None else f"sha256:{self.sha256}"

    @property
    def sha256(self) -> str:
        """Checksum of the capture, empty for drawn values."""
        return "" if self.record is None else self.record.sha256

    @property
    def family(self) -> Family:
        """The op family of the call."""
        return family(self.shape.family)

    @property
    def saved_shape(self) -> Shape:
        """The shape of what a capture holds of its call; the full shape of drawn values."""
        return self.shape if self.record is None else self.family.saved_shape(self.record)

    def load(self, device: torch.device | str) -> ReplayCall:
        """Load what errors are judged on: a capture as it was saved, or the drawn call.

        Raises:
            CaptureError: the capture is damaged.
        """
        if self.record is None:
            return self.family.drawn(self.shape, device, self.seed, self.distribution)
        folder = CaptureFolder(Path(self.folder), (self.record,))
        return self.family.captured(folder, self.record, device)

    def timed(self, judged: ReplayCall, device: torch.device | str) -> ReplayCall:
        """Return what is timed: on a GPU the full call, on a CPU what was saved."""
        if self.record is None:
            return judged
        on_cpu = torch.device(device).type == "cpu"
        return judged.full_size(judged.shape if on_cpu else self.shape)


def runs(call: Callable[[], object]) -> bool:
    """Tell whether a call runs at its full size, which may take more memory than there is."""
    try:
        call()
    except (RuntimeError, ValueError):
        logger.debug("a call cannot be timed", exc_info=True)
        return False
    return True
