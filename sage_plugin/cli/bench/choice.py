"""Which inputs a CPU compares on, where kernels are emulated and nobody waits for hours."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from sage_plugin.cli.console import say
from sage_plugin.errors import UsageError

if TYPE_CHECKING:
    from sage_plugin.bench.compare import BenchPlan
    from sage_plugin.bench.suite import Suite


def short_enough(suite: Suite, plan: BenchPlan, *, may_choose: bool) -> Suite:
    """Return what a CPU can do while somebody waits: all inputs, or some if we may choose them."""
    from sage_plugin.bench.forecast import PATIENCE_S, cpu_seconds, duration

    kernels = (*(() if plan.reference is None else (plan.reference,)), *plan.kernels)
    needed = [cpu_seconds([case], kernels) for case in suite.cases]
    if sum(needed) <= PATIENCE_S:
        return suite
    count = sum(total <= PATIENCE_S for total in itertools.accumulate(sorted(needed)))
    if not may_choose or not count:
        raise UsageError(
            f"this would take about {duration(sum(needed))} on a CPU, where kernels are emulated "
            "and times say nothing: use fewer or smaller inputs (--max-inputs, --kernel), or "
            "--force"
        )
    chosen = sorted(range(len(needed)), key=needed.__getitem__)[:count]
    if len(set(needed)) == 1:  # alike: spread over the run
        chosen = [number * len(needed) // count for number in range(count)]
    cases = tuple(suite.cases[number] for number in sorted(chosen))
    names = ", ".join(Path(case.record.file).stem for case in cases if case.record is not None)
    say(
        f"All {len(needed)} captures would take about {duration(sum(needed))} on a CPU, where "
        f"kernels are emulated: comparing on {count} of them, {names} (--force for all).",
        to_stderr=True,
    )
    return dataclasses.replace(suite, cases=cases)
