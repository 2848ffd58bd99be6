"""A kernel on one input: its config looked up, one run judged, its timed calls prepared."""

from __future__ import annotations

from dataclasses import dataclass

from sage_plugin.accuracy.metrics import errors_of
from sage_plugin.accuracy.output import CheckedOutput, ExactRows
from sage_plugin.families import Family
from sage_plugin.families.family import ReplayCall, SplitCall
from sage_plugin.kernels.contract import HOST, Decision, ResolvedConfig
from sage_plugin.schema import DeviceFacts, ErrorMetrics


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel that can run an input.

    Attributes:
        decision: kernel and variant.
        found: the launch config, `None` if nothing is tuned.
        checked: rows of its output, before the last rounding.
        errors: of those rows against the exact ones.
        timed: the timed call in its two parts.
    """

    decision: Decision
    found: ResolvedConfig | None
    checked: CheckedOutput
    errors: ErrorMetrics
    timed: SplitCall

    @property
    def label(self) -> str:
        """`kernel:variant`."""
        return self.decision.label


def candidate(
    family: Family,
    decision: Decision,
    judged: ReplayCall,
    timed: ReplayCall,
    exact: ExactRows,
    facts: DeviceFacts,
    *,
    config_dir: str | None = None,
) -> Candidate:
    """Judge one run of a kernel and prepare its timed calls, all with one launch config."""
    found = None
    if decision.variant != HOST:
        key = family.call_key(timed.shape, decision)
        found = family.find_launch(key, facts, config_dir=config_dir)
    config = None if found is None else found.config
    checked = judged.checked(decision, config, exact)
    split = timed.split(decision, config, facts)
    if timed is not judged:  # what cannot run at the full size shows here
        split.alone()
    errors = errors_of(checked, exact, dtype=judged.dtype)
    return Candidate(decision, found, checked, errors, split)
