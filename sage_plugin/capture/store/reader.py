"""Reads a capture folder that may come from anywhere: nothing in it is believed without a check."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from sage_plugin.capture.record import AttentionCapture, CaptureRecord, LinearCapture
from sage_plugin.capture.store.checks import capture_problem
from sage_plugin.capture.store.linear_file import weight_hash
from sage_plugin.capture.store.manifest import (
    COUNTS,
    MANIFEST,
    CallCounts,
    read_counts,
    read_manifest,
)
from sage_plugin.capture.store.paths import SUFFIX, printable
from sage_plugin.errors import CaptureError


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """One loaded capture of attention, indexed bhsd.

    Attributes:
        q: saved query heads, (b, hq, Sq, D).
        k: saved key heads, (b, hk, Sk, D), not expanded for GQA.
        v: saved value heads, (b, hk, Sk, Dv).
        key_bias: (b or 1, hq or 1, Sk), fp32, added to the scores; `None` without a key mask.
        attn_mask: (b or 1, hq or 1, Sq, Sk); `None` without a dense mask.
        record: the manifest line.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    key_bias: torch.Tensor | None
    attn_mask: torch.Tensor | None
    record: AttentionCapture

    @property
    def mask(self) -> torch.Tensor | None:
        """The mask as kernels take it, (b or 1, hq or 1, Sq or 1, Sk); `None` without one.

        A key bias of 0 and -inf alone comes back as the bool mask that it was recorded from.
        """
        if self.attn_mask is not None:
            return self.attn_mask.float() if self.attn_mask.itemsize == 8 else self.attn_mask
        if self.key_bias is None:
            return None
        bias = self.key_bias[:, :, None]
        hidden = torch.isneginf(bias)
        return ~hidden if bool((hidden | (bias == 0)).all().item()) else bias


@dataclass(frozen=True, slots=True)
class CaptureFolder:
    """The index of a capture folder; tensors are loaded one capture at a time.

    Attributes:
        path: the folder.
        records: the captures whose files look sound.
        call_counts: calls seen while recording, saved or not; all zero if the file is damaged.
        problems: one sentence for each thing that was left out.
    """

    path: Path
    records: tuple[CaptureRecord, ...]
    call_counts: CallCounts = field(default_factory=CallCounts)
    problems: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Calls by layer."""
        return self.call_counts.layers

    def damage(self, record: CaptureRecord) -> str | None:
        """How the contents of a capture differ from those recorded, `None` if not; reads all."""
        try:
            with open(self.path / record.file, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return f"{record.file} cannot be read: {error}"
        if digest != record.sha256:
            return f"{record.file} does not match its checksum: damaged"
        if isinstance(record, LinearCapture) and record.needs_weight:
            try:
                self.weight(record)
            except CaptureError as error:
                return str(error).removeprefix(f"{self.path}: ")
        return None

    def load(self, record: AttentionCapture, device: torch.device | str = "cpu") -> CapturedCall:
        """Load one capture of attention after checking it against its checksum.

        Raises:
            CaptureError: the file changed since it was recorded, or does not match its line.
        """
        tensors = self.tensors(record, device)
        return CapturedCall(
            q=tensors["q"],
            k=tensors["k"],
            v=tensors["v"],
            key_bias=tensors.get("key_bias"),
            attn_mask=tensors.get("attn_mask"),
            record=record,
        )

    def weight(self, record: LinearCapture, device: torch.device | str = "cpu") -> torch.Tensor:
        """Load the weight that the rows of a capture met, (N, K), in its own dtype.

        Raises:
            CaptureError: the folder does not hold it, or another one.
        """
        name = record.weight_file
        if not name:
            raise CaptureError(
                f"{self.path}: {record.file} has no weight beside it: {record.weight_key} was "
                "larger than the budget left for one capture; record again with a larger "
                "--max-bytes or fewer --max-captures"
            )
        try:
            weight = load_file(self.path / name)["weight"]
        except (OSError, SafetensorError, KeyError) as error:
            raise CaptureError(f"{self.path}: {name} cannot be read: {error}") from error
        if weight_hash(weight) != record.weight_sha256:
            raise CaptureError(f"{self.path}: {name} does not match its checksum: damaged")
        return weight.to(device)

    def tensors(
        self, record: CaptureRecord, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Load the tensors of one capture after checking them against their checksum.

        Raises:
            CaptureError: a file changed since it was recorded, or does not match its line.
        """
        problem = capture_problem(self.path, record)
        if problem is not None:
            raise CaptureError(f"{self.path}: {printable(problem)}; record again")
        path = self.path / record.file
        damage = self.damage(record)
        if damage is not None:
            raise CaptureError(f"{self.path}: {damage}; record again")
        try:
            return dict(load_file(path, device=str(device)))
        except (OSError, SafetensorError) as error:
            raise CaptureError(f"{path} cannot be read: {error}") from error


def open_captures(folder: Path | str, family: str | None = None) -> CaptureFolder:
    """Read the index of a capture folder and look at the head of each file.

    Args:
        folder: what `sage capture` or `record` wrote.
        family: the op family whose captures are wanted, `None` for all.

    Raises:
        CaptureError: no such folder, a foreign or empty one, another schema version, or no capture
            that can be used.

    Example:
        >>> from sage_plugin.capture.store.reader import open_captures
        >>> open_captures("nowhere")
        Traceback (most recent call last):
        ...
        sage_plugin.errors.CaptureError: nowhere does not exist: record one with `sage capture`
    """
    path = Path(folder)
    _check_is_capture_folder(path)
    manifest = read_manifest(path)
    problems = list(manifest.problems)
    records: dict[str, CaptureRecord] = {}
    for record in manifest.records:
        problem = capture_problem(path, record)
        if problem is None and record.file in records:
            problem = f"{record.file} is listed twice"
        if problem is not None:
            problems.append(f"{problem}; it is left out")
        else:
            records[record.file] = record
    if not records:
        found = printable(problems[0]) if problems else "its manifest is empty"
        raise CaptureError(f"{path} holds no usable capture ({found}): record with `sage capture`")
    problems += _unlisted(path, {name for record in manifest.records for name in record.files})
    wanted = tuple(r for r in records.values() if family in (None, r.family))
    if not wanted:
        kinds = " and ".join(dict.fromkeys(record.family for record in records.values()))
        raise CaptureError(
            f"{path} holds captures of {kinds} and none of {family}: record with "
            f"`sage capture --op {family}`"
        )
    try:
        counts = read_counts(path)
    except CaptureError as error:
        counts = CallCounts()
        problems.append(f"{error}; call counts are unknown")
    return CaptureFolder(path, wanted, counts, tuple(map(printable, problems)))


def _check_is_capture_folder(path: Path) -> None:
    advice = "record one with `sage capture`"
    if not os.path.exists(path):
        raise CaptureError(f"{path} does not exist: {advice}")
    if not os.path.isdir(path):
        raise CaptureError(f"{path} is a file, not a capture folder: {advice}")
    if os.path.exists(path / MANIFEST):
        return
    try:
        names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    except OSError as error:
        raise CaptureError(f"{path} cannot be read ({error.strerror}): {advice}") from None
    if not names:
        raise CaptureError(f"{path} is empty: {advice}")
    shown = printable(", ".join(names[:3])) + (", ..." if len(names) > 3 else "")
    raise CaptureError(
        f"{path} holds {shown} but no {MANIFEST}, so it is not a capture folder: {advice}"
    )


def _unlisted(path: Path, listed: Iterable[str]) -> list[str]:
    """Sentences on files that an interrupted write left behind."""
    known = {MANIFEST, COUNTS, *listed}
    names = sorted(p.name for p in path.iterdir() if p.name not in known)
    return [
        f"{name} is in no manifest line (an interrupted write); it is left out"
        for name in names
        if SUFFIX in name or name.startswith(".tmp")
    ]
