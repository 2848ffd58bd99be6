"""What to run: captures of a folder, preset shapes or one explicit shape, as a list of cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sage_plugin.capture.selection.reduce import pick
from sage_plugin.capture.store.paths import printable
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.errors import UsageError
from sage_plugin.measure.inputs import presets
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.schema import CallShape, CaptureRecord


@dataclass(frozen=True, slots=True)
class Suite:
    """Cases in the order in which they run, and what was left out.

    Attributes:
        cases: the inputs.
        skipped: a sentence for each capture that could not be read.
    """

    cases: tuple[ReplayInputs, ...]
    skipped: tuple[str, ...] = ()


def captured(folder: Path, max_inputs: int | None = None) -> Suite:
    """Cases of a capture folder, spread over shapes, layers and steps where they are too many.

    Raises:
        CaptureError: the folder is missing, empty or foreign.
    """
    captures = open_captures(folder)
    chosen = captures.records if max_inputs is None else pick(captures.records, max_inputs)
    cases = (ReplayInputs(r.shape, _capture_name(r), str(folder), r) for r in chosen)
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
        cases.append(ReplayInputs(shape, name, distribution=distribution, seed=seed))
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
    return Suite((ReplayInputs(shape, describe(shape), distribution=distribution, seed=seed),))


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
