"""What became of a session: one outcome per study, and the files that say so."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sage_plugin import files
from sage_plugin.schema import LaunchConfig, RegistryEntry, Trial
from sage_plugin.tune.configs import promote, search
from sage_plugin.tune.configs.plan import TuningPlan
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run.ledger import Ledger
from sage_plugin.tune.run.study import Study


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one study.

    `verdict` is "tuned", "confirmed" or "failed", `written` what the registry did: "added",
    "replaced" or "kept: <why>"; `trials` counts screened configs by status.
    """

    study: Study
    verdict: str
    entry: RegistryEntry | None
    written: str
    trials: dict[str, int]
    kernel_ms: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TuneReport:
    """What a session did.

    Attributes:
        plan: what was to be done.
        outcomes: studies that were decided, in the plan's order.
        interrupted: the session was ended by Ctrl-C; the same command goes on from there.
    """

    plan: TuningPlan
    outcomes: tuple[Outcome, ...]
    interrupted: bool = False

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """Studies in which nothing passed the gate."""
        return tuple(outcome for outcome in self.outcomes if outcome.verdict == promote.FAILED)


def outcome_of(
    study: Study,
    verdict: promote.StudyVerdict,
    written: str,
    screens: dict[LaunchConfig, Trial],
    finals: dict[LaunchConfig, Trial],
) -> Outcome:
    """Put together what a study came to."""
    counts = dict(Counter(trial.status for trial in screens.values()))
    if verdict.entry is None:
        return Outcome(study, verdict.kind, None, written, counts, notes=(verdict.reason,))
    config = verdict.entry.config
    kernel_time = finals[config].kernel_time
    return Outcome(
        study,
        verdict.kind,
        verdict.entry,
        written,
        counts,
        kernel_ms=None if kernel_time is None else kernel_time.median_ms,
        notes=_winner_notes(study, verdict, config),
    )


def _winner_notes(
    study: Study, verdict: promote.StudyVerdict, config: LaunchConfig
) -> tuple[str, ...]:
    notes = search.edges(config, study.space) if verdict.kind == promote.TUNED else ()
    saved = study.timed.saved_shape
    if study.device == "cpu" and saved != study.timed.shape:
        part = f"{saved.batch}x{saved.heads_q} of {study.timed.shape.batch}x"
        notes += (f"timed on the saved part of the call: {part}{study.timed.shape.heads_q} heads",)
    return notes


def write_metadata(plan: TuningPlan, argv: Sequence[str]) -> None:
    """Write `run_metadata.json`.

    Raises:
        OutputError: it cannot be written.
    """
    request = plan.request
    options = {
        "min_gain": request.min_gain,
        "seed": request.seed,
        "timeout_s": request.timeout_s,
        **dataclasses.asdict(request.limits),
    }
    data = run_folder.metadata(
        argv=argv,
        facts=plan.facts,
        studies=plan.studies,
        options=options,
        git=run_folder.git_revision(),
    )
    files.write_json(plan.run_folder / run_folder.METADATA, data, follow=False)


def write_results(plan: TuningPlan, outcomes: Sequence[Outcome], ledger: Ledger) -> None:
    """Write `results.json` and `trials.csv` from what is known so far.

    Raises:
        OutputError: they cannot be written.
    """
    folder = plan.run_folder
    results = [
        {
            "study": outcome.study.id,
            "key": outcome.study.key.to_json(),
            "verdict": outcome.verdict,
            "entry": None if outcome.entry is None else outcome.entry.to_json(),
            "registry": outcome.written,
            "trials": outcome.trials,
            "notes": list(outcome.notes),
        }
        for outcome in outcomes
    ]
    data = {
        "run": folder.name,
        "device": plan.facts.slug,
        "registry": str(plan.registry_path),
        "studies": len(plan.studies),
        "results": results,
    }
    files.write_json(folder / run_folder.RESULTS, data, follow=False)
    run_folder.write_trials(folder / run_folder.TRIALS, plan.studies, ledger.all())
