"""The lines of a capture folder's `manifest.jsonl`: one saved call each, by op family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from sage_plugin.paged_records import PagedShape
from sage_plugin.schema import AnyShape, CallShape, JsonRecord, LinearShape


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRecord(JsonRecord, ABC):
    """What is known of a saved call of any op family.

    Attributes:
        schema_version: `SCHEMA_VERSION` of the writer.
        family: op family.
        file: name of the safetensors file in the folder.
        layer: module path, with the component in front.
        step: denoising step (forward of the component), from 0.
        timestep: the model's own timestep, or `None`.
        call_index: which call of that layer in that step, from 0.
        shape: the full call.
        model_class: class of the model.
        config_hash: hash of the model's config, or empty.
        versions: package name to version.
        sha256: checksum of the file.
        denoising_step: denoising step, from 0, which may take two forwards; `None` where the model
            is called without a timestep, and in records of earlier releases.
    """

    schema_version: int
    family: str
    file: str
    layer: str
    step: int
    timestep: float | None
    call_index: int
    shape: AnyShape
    model_class: str
    config_hash: str
    versions: dict[str, str]
    sha256: str
    denoising_step: int | None = None

    @property
    @abstractmethod
    def size(self) -> int:
        """How much of its call a capture holds, in parts of the family's own."""

    @property
    @abstractmethod
    def is_partial(self) -> bool:
        """Whether that is not all of it."""

    @property
    def files(self) -> tuple[str, ...]:
        """Names of its files; others may share all but the first."""
        return (self.file,)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCapture(CaptureRecord):
    """A saved call of attention.

    Attributes:
        batch_indices: batch items that were saved.
        head_indices: key heads that were saved (their query heads go with them).
        strides_q: strides of Q as it arrived, in elements of its own layout; likewise K and V.
        text_length: leading text tokens of a joint sequence, or `None`.
    """

    shape: CallShape
    batch_indices: tuple[int, ...]
    head_indices: tuple[int, ...]
    strides_q: tuple[int, ...]
    strides_k: tuple[int, ...]
    strides_v: tuple[int, ...]
    text_length: int | None

    @property
    def size(self) -> int:
        """Key heads of all batch items."""
        return len(self.batch_indices) * len(self.head_indices)

    @property
    def is_partial(self) -> bool:
        """Whether heads or batch items were left out."""
        return self.size != self.shape.batch * self.shape.heads_k


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCapture(CaptureRecord):
    """A saved call of a linear, or grouped one: rows of its input, and which weight they meet.

    Attributes:
        rows: rows that were saved, spread evenly over the call's.
        weight_key: name of the weight in the component's own safetensors.
        weight_sha256: checksum of the weight's bytes in its own dtype.
        weight_file: name of the file in the folder that holds the weight, for all captures that
            meet it; empty where it was too large for the folder.
    """

    shape: LinearShape
    rows: int
    weight_key: str
    weight_sha256: str
    weight_file: str

    @property
    def needs_weight(self) -> bool:
        """Whether it cannot be replayed without the weight; those of experts may be drawn."""
        return bool(self.weight_file) or not self.shape.groups

    @property
    def size(self) -> int:
        """Saved rows."""
        return self.rows

    @property
    def is_partial(self) -> bool:
        """Whether rows were left out."""
        return self.rows != self.shape.rows

    @property
    def files(self) -> tuple[str, ...]:
        """Names of its own file and of the weight's."""
        return (self.file, self.weight_file) if self.weight_file else (self.file,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCapture(CaptureRecord):
    """A saved call of paged attention: all lengths, rows of Q, and what its pages hold.

    Attributes:
        rows: rows of Q that were saved, spread evenly over the call's.
        pages: pages that the call reads, each counted once.
        holds_pages: whether they were saved; else what they hold is known by mean and deviation.
        scale: factor of the scores.
    """

    shape: PagedShape
    rows: int
    pages: int
    holds_pages: bool
    scale: float

    @property
    def size(self) -> int:
        """Keys of all sequences."""
        return sum(self.shape.kv_lens)

    @property
    def is_partial(self) -> bool:
        """Whether rows or what the pages hold were left out."""
        return self.rows != self.shape.tokens or not self.holds_pages
