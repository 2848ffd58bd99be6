"""The captures of a folder as a list of cases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sage_plugin.capture.selection.reduce import pick
from sage_plugin.capture.store.paths import printable
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.schema import ATTENTION


@dataclass(frozen=True, slots=True)
class Suite:
    """Cases in the order in which they run, and what was left out.

    Attributes:
        cases: the inputs.
        skipped: a sentence for each capture that could not be read.
    """

    cases: tuple[ReplayInputs, ...]
    skipped: tuple[str, ...] = ()


def captured(folder: Path, max_inputs: int | None = None, family: str = ATTENTION) -> Suite:
    """List the captures of a folder, spread over shapes, layers and steps if they are too many.

    Args:
        folder: the captures.
        max_inputs: how many, all if `None`.
        family: their op family.
    """
    captures = open_captures(folder, family)
    chosen = captures.records if max_inputs is None else pick(captures.records, max_inputs)
    names = [f"{Path(r.file).stem} {printable(r.layer)} step {r.step}" for r in chosen]
    pairs = zip(names, chosen, strict=True)
    cases = tuple(ReplayInputs(r.shape, name, str(folder), r) for name, r in pairs)
    return Suite(cases, captures.problems)
