"""What to run: captures of a folder, preset shapes or one explicit shape, as a list of cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sage_plugin.capture.selection.reduce import pick
from sage_plugin.capture.store.paths import printable
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.errors import UsageError
from sage_plugin.measure.inputs import Tensors, full_size, presets, synthetic
from sage_plugin.measure.masks import full_mask, synthetic_mask
from sage_plugin.schema import CallShape, CaptureRecord


@dataclass(frozen=True, slots=True)
class Case:
    """One input to run every kernel on.

    Attributes:
        name: what reports call it.
        shape: the full call.
        distribution: of the synthetic values; empty for a capture.
        seed: of the synthetic values.
        folder: the capture folder, `None` where the input is synthetic.
        record: the capture's manifest line, `None` where the input is synthetic.
    """

    name: str
    shape: CallShape
    distribution: str = ""
    seed: int = 0
    folder: Path | None = None
    record: CaptureRecord | None = None

    @property
    def source(self) -> str:
        """`capture`, or `synthetic:` and the distribution."""
        return "capture" if self.record is not None else f"synthetic:{self.distribution}"


@dataclass(frozen=True, slots=True)
class Suite:
    """Cases in the order in which they run, and what was left out.

    Attributes:
        cases: the inputs.
        skipped: a sentence for each capture that could not be read.
    """

    cases: tuple[Case, ...]
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchInputs:
    """The tensors of one case, indexed bhsd.

    Attributes:
        judged: Q, K and V on which the error is taken.
        timed: Q, K and V that are timed.
        shape: shape of the timed call.
        judged_mask: mask of the judged call, (B or 1, Hq or 1, Sq or 1, Sk), or `None`.
        timed_mask: likewise, of the timed one.
    """

    judged: Tensors
    timed: Tensors
    shape: CallShape
    judged_mask: torch.Tensor | None = None
    timed_mask: torch.Tensor | None = None


def captured(folder: Path, max_inputs: int | None = None) -> Suite:
    """Cases of a capture folder, spread over shapes, layers and steps where they are too many.

    Raises:
        CaptureError: the folder is missing, empty or foreign.
    """
    captures = open_captures(folder)
    chosen = captures.records if max_inputs is None else pick(captures.records, max_inputs)
    cases = (Case(name=_capture_name(r), shape=r.shape, folder=folder, record=r) for r in chosen)
    return Suite(tuple(cases), captures.problems)


def _capture_name(record: CaptureRecord) -> str:
    return f"{Path(record.file).stem} {printable(record.layer)} step {record.step}"


def preset(
    names: Sequence[str],
    *,
    distribution: str,
    seed: int,
    dtype: str | None,
    mask_kind: str = "none",
) -> Suite:
    """Cases of preset shapes, `"all"` for each of them, with a drawn mask of the kind.

    Raises:
        UsageError: a name is no preset.

    Example:
        >>> suite = preset(["wan-720p"], distribution="normal", seed=0, dtype=None)
        >>> suite.cases[0].shape.seq_q
        75600
    """
    known = presets()
    unknown = [name for name in names if name not in (*known, "all")]
    if unknown:
        raise UsageError(f"preset {unknown[0]!r}: allowed are all, {', '.join(known)}")
    wanted = list(known) if "all" in names else list(dict.fromkeys(names))
    cases = []
    for name in wanted:
        shape = dataclasses.replace(known[name], mask_kind=mask_kind)
        shape = shape if dtype is None else dataclasses.replace(shape, dtype=dtype)
        cases.append(Case(name=name, shape=shape, distribution=distribution, seed=seed))
    return Suite(tuple(cases))


def explicit(shape: CallShape, *, distribution: str, seed: int) -> Suite:
    """The one case of a shape that was spelt out.

    Raises:
        UsageError: V is not as wide as Q and K.
    """
    if shape.dv != shape.head_dim:
        raise UsageError(
            f"-dv {shape.dv} differs from -d {shape.head_dim}: the kernels here need V as wide as "
            "Q and K; leave -dv out"
        )
    return Suite((Case(describe(shape), shape, distribution=distribution, seed=seed),))


def describe(shape: CallShape) -> str:
    """A shape in a few words: batch, heads, length and channels, `query:key` where they differ.

    Example:
        >>> from sage_plugin.measure.inputs import presets
        >>> describe(presets()["cogvideox-2b"])
        '2x30x17776x64 bfloat16 bhsd'
    """

    def pair(query: int, key: int) -> str:
        return f"{query}" if query == key else f"{query}:{key}"

    heads, seq = pair(shape.heads_q, shape.heads_k), pair(shape.seq_q, shape.seq_k)
    more = " causal" if shape.causal else ""
    more += "" if shape.mask_kind == "none" else f" {shape.mask_kind}"
    return f"{shape.batch}x{heads}x{seq}x{shape.head_dim} {shape.dtype} {shape.layout}{more}"


def load(case: Case, device: torch.device) -> BenchInputs:
    """The tensors of a case on the device.

    A capture is judged on its saved heads. On a GPU it is timed at the full call shape, by
    repeating them; on a CPU as it was saved.

    Raises:
        CaptureError: the file is damaged.
    """
    if case.record is None or case.folder is None:
        tensors = synthetic(
            case.shape, device=device, seed=case.seed, distribution=case.distribution
        )
        mask = synthetic_mask(case.shape, device=device, seed=case.seed)
        return BenchInputs(tensors, tensors, case.shape, mask, mask)
    call = open_captures(case.folder).load(case.record, device=str(device))
    saved, mask = (call.q, call.k, call.v), call.mask
    if device.type != "cpu":
        return BenchInputs(saved, full_size(call), case.shape, mask, full_mask(call))
    return BenchInputs(saved, saved, saved_shape(case), mask, mask)


def saved_shape(case: Case) -> CallShape:
    """The shape of what lies on disk; the case's own where nothing does."""
    if case.record is None:
        return case.shape
    group = case.shape.heads_q // case.shape.heads_k
    heads_k = len(case.record.head_indices)
    return dataclasses.replace(
        case.shape,
        batch=len(case.record.batch_indices),
        heads_q=heads_k * group,
        heads_k=heads_k,
    )
