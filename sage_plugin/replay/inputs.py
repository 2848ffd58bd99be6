"""One input of a replay, a capture on disk or numbers to be drawn, and how it is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from sage_plugin.capture.store.reader import CaptureFolder
from sage_plugin.measure.inputs import synthetic
from sage_plugin.measure.masks import synthetic_mask
from sage_plugin.replay.call import ReplayCall
from sage_plugin.schema import CallKey, CallShape, CaptureRecord


@dataclass(frozen=True, slots=True)
class ReplayInputs:
    """Q, K and V of one call, and its mask, before they are loaded.

    Attributes:
        shape: the full call.
        name: what reports call it.
        folder: the capture folder, empty for drawn values.
        record: the capture's manifest line, `None` for drawn values.
        distribution: of drawn values, a name of `measure.inputs.DISTRIBUTIONS`.
        seed: of drawn values.
    """

    shape: CallShape
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
    def saved_shape(self) -> CallShape:
        """The shape of what a capture holds of its call; the full shape of drawn values."""
        if self.record is None:
            return self.shape
        group = self.shape.heads_q // self.shape.heads_k
        batch, heads = len(self.record.batch_indices), len(self.record.head_indices)
        return dataclasses.replace(self.shape, batch=batch, heads_q=heads * group, heads_k=heads)

    def load(self, device: torch.device | str) -> ReplayCall:
        """What errors are judged on: a capture as it was saved, or the drawn call.

        Raises:
            CaptureError: the capture is damaged.
        """
        if self.record is None:
            tensors = synthetic(
                self.shape, device=device, seed=self.seed, distribution=self.distribution
            )
            mask = synthetic_mask(self.shape, device=device, seed=self.seed)
            return ReplayCall(tensors, mask, self.shape)
        call = CaptureFolder(Path(self.folder), (self.record,)).load(self.record, str(device))
        return ReplayCall((call.q, call.k, call.v), call.mask, self.saved_shape)

    def timed(self, judged: ReplayCall, device: torch.device | str) -> ReplayCall:
        """What is timed: on a GPU the full call, on a CPU what was saved."""
        if self.record is None:
            return judged
        on_cpu = torch.device(device).type == "cpu"
        return judged.full_size(judged.shape if on_cpu else self.shape)


def describe(shape: CallShape) -> str:
    """Write a shape in a few words: batch, heads, length and channels, `query:key` if they differ.

    Example:
        >>> from sage_plugin.measure.inputs import presets
        >>> describe(presets()["cogvideox-2b"])
        '2x30x17776x64 bf16 bhsd'
    """

    def pair(query: int, key: int) -> str:
        return f"{query}" if query == key else f"{query}:{key}"

    heads, seq = pair(shape.heads_q, shape.heads_k), pair(shape.seq_q, shape.seq_k)
    sizes = f"{shape.batch}x{heads}x{seq}x{shape.head_dim}"
    return f"{sizes} {short_dtype(shape.dtype)} {shape.layout}{mask_words(shape)}"


def mask_words(call: CallShape | CallKey) -> str:
    """Write what hides keys from queries: ` causal`, and the kind of mask, if there are any."""
    causal = " causal" if call.causal else ""
    return causal + ("" if call.mask_kind == "none" else f" {call.mask_kind}")


def short_dtype(name: str) -> str:
    """Shorten torch's name of a floating-point dtype.

    Example:
        >>> short_dtype("bfloat16"), short_dtype("float32")
        ('bf16', 'fp32')
    """
    return name.replace("bfloat", "bf").replace("float", "fp")
