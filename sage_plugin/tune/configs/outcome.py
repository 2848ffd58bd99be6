"""What became of a session: one outcome per study, and the files that say so."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sage_plugin import files
from sage_plugin.schema import NO_SPEEDS, AnyEntry, AnyLaunch, Trial
from sage_plugin.tune.configs import promote
from sage_plugin.tune.configs.plan import TuningPlan, TuningRequest
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run.ledger import Ledger
from sage_plugin.tune.run.study import Study
from sage_plugin.tune.search import front, search
from sage_plugin.tune.search.front import FrontPoint
from sage_plugin.tune.search.search import Search

UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one study.

    `verdict` is "tuned", "confirmed", "failed" or "unfinished", `written` what the registry did:
    "added", "replaced" or "kept: <why>"; `trials` counts configs by status, "inexact" those beyond
    the error limit and "skipped" those larger than one that did not fit. `best` is the fastest
    config of the screen that may win, with its time over that of the default.
    """

    study: Study
    verdict: str
    entry: AnyEntry | None
    written: str
    trials: dict[str, int]
    kernel_ms: float | None = None
    notes: tuple[str, ...] = ()
    front: tuple[FrontPoint, ...] = ()
    best: tuple[AnyLaunch, float] | None = None


@dataclass(frozen=True, slots=True)
class TuneReport:
    """What a session did.

    Attributes:
        plan: what was to be done.
        outcomes: studies that were decided, in the plan's order.
        unfinished: studies that were begun and not decided.
        interrupted: the session was ended by Ctrl-C or SIGTERM; the same command goes on there.
    """

    plan: TuningPlan
    outcomes: tuple[Outcome, ...]
    unfinished: tuple[Outcome, ...] = ()
    interrupted: bool = False

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """Studies in which nothing passed the gate."""
        return tuple(outcome for outcome in self.outcomes if outcome.verdict == promote.FAILED)


def outcome_of(
    tried: Search,
    study: Study,
    verdict: promote.StudyVerdict,
    written: str,
    trials: Mapping[AnyLaunch, Trial],
    finals: Mapping[AnyLaunch, Trial],
) -> Outcome:
    """Put together what a study came to."""
    screened = _screened(tried, study, trials)
    found = dataclasses.replace(
        screened, verdict=verdict.kind, entry=verdict.entry, written=written
    )
    if verdict.entry is None:
        return dataclasses.replace(found, notes=(verdict.reason,))
    config = verdict.entry.config
    kernel_time = finals[config].kernel_time
    return dataclasses.replace(
        found,
        kernel_ms=None if kernel_time is None else kernel_time.median_ms,
        notes=_winner_notes(study, verdict, config),
    )


def unfinished(study: Study, request: TuningRequest, trials: Mapping[AnyLaunch, Trial]) -> Outcome:
    """Put together what is known of a study that was begun and not decided."""
    return _screened(Search(study.space, error_limit=request.error_limit), study, trials)


def _screened(tried: Search, study: Study, trials: Mapping[AnyLaunch, Trial]) -> Outcome:
    """What the screen alone says: configs by what became of them, the best, and the front."""
    allowed = {trial.config: search.ratio(trial) for trial in tried.allowed(trials)}
    counts = Counter(
        "inexact" if t.status == "ok" and t.config not in allowed else t.status
        for t in trials.values()
    )
    counts["skipped"] = len(tried.skipped(trials))
    known = {status: count for status, count in counts.items() if count}
    best = next(iter(allowed.items()), None)
    points = front.front(tried, trials)
    return Outcome(study, UNFINISHED, None, "", known, front=points, best=best)


def _winner_notes(
    study: Study, verdict: promote.StudyVerdict, config: AnyLaunch
) -> tuple[str, ...]:
    notes = search.edges(config, study.space) if verdict.kind == promote.TUNED else ()
    saved = study.timed.saved_shape
    if study.device == "cpu" and saved != study.timed.shape:
        part = f"{saved.batch}x{saved.heads_q} of {study.timed.shape.batch}x"
        notes += (f"timed on the saved part of the call: {part}{study.timed.shape.heads_q} heads",)
    return notes


def write_metadata(plan: TuningPlan, argv: Sequence[str]) -> None:
    """Write `run_metadata.json`: what tells, later, what a run measured and with what."""
    request, studies = plan.request, plan.studies
    data = {
        "argv": list(argv),
        "options": {
            "min_gain": request.min_gain,
            "seed": request.seed,
            "timeout_s": request.timeout_s,
            **dataclasses.asdict(request.error_limit),
            **dataclasses.asdict(request.limits),
        },
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "git": run_folder.git_revision(),
        "device": plan.facts.to_json(),
        "toolchain": studies[0].toolchain.to_json(),
        "studies": [
            {
                "id": study.id,
                "key": study.key.to_json(),
                "configs": len(study.space),
                "inputs": [source.label for source in study.sources],
                "timed": study.timed.label,
                "gate": study.gate.to_json(),
                "timer": study.timer.to_json(),
            }
            for study in studies
        ],
    }
    files.write_json(plan.run_folder / run_folder.METADATA, data, follow=False)


def write_results(
    plan: TuningPlan, outcomes: Sequence[Outcome], begun: Sequence[Outcome], ledger: Ledger
) -> None:
    """Write `results.json`, `trials.csv` and the plot of the fronts from what is known so far."""
    folder = plan.run_folder
    data = {
        "run": folder.name,
        "device": plan.facts.slug,
        "registry": str(plan.registry_path),
        "studies": len(plan.studies),
        "results": [_result(outcome) for outcome in outcomes],
        "unfinished": [_result(outcome) for outcome in begun],
    }
    files.write_json(folder / run_folder.RESULTS, data, follow=False)
    run_folder.write_trials(folder / run_folder.TRIALS, plan.studies, ledger.all())


def with_fronts(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """List the outcomes where exactness could be sold for time; an emulation has no times."""
    return [o for o in outcomes if len(o.front) > 1 and o.study.key.variant not in NO_SPEEDS]


def save_fronts(report: TuneReport) -> str:
    """Plot the fronts of all studies with more than one point; return why there is no plot."""
    every = {f"{o.study.kernel} {o.study.timed.family.describe(o.study.timed.shape)}": o
             for o in with_fronts(report.outcomes)}  # fmt: skip
    if not every:
        return ""
    points = {name: outcome.front for name, outcome in every.items()}
    chosen = {name: o.entry.config for name, o in every.items() if o.entry is not None}
    return front.save(points, chosen, report.plan.run_folder / run_folder.FRONT)


def _result(outcome: Outcome) -> dict[str, Any]:
    best = outcome.best
    return {
        "study": outcome.study.id,
        "key": outcome.study.key.to_json(),
        "verdict": outcome.verdict,
        "entry": None if outcome.entry is None else outcome.entry.to_json(),
        "registry": outcome.written,
        "trials": outcome.trials,
        "best": None if best is None else {"config": best[0].to_json(), "ratio": best[1]},
        "front": [point.to_json() for point in outcome.front],
        "notes": list(outcome.notes),
    }
