"""A tuning session: every study searched, raced, decided and merged, whatever happens meanwhile."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence

from sage_plugin.errors import TuningError
from sage_plugin.registry import lookup
from sage_plugin.registry.merge import merge
from sage_plugin.schema import LaunchConfig, RegistryEntry, Trial
from sage_plugin.tune.configs import promote, search
from sage_plugin.tune.configs.final import MIN_BUDGET_S, run_final
from sage_plugin.tune.configs.outcome import (
    Outcome,
    TuneReport,
    outcome_of,
    write_metadata,
    write_results,
)
from sage_plugin.tune.configs.plan import TuningPlan
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run.crash_marker import CrashMarker
from sage_plugin.tune.run.ledger import Ledger
from sage_plugin.tune.run.observer import Observer
from sage_plugin.tune.run.runner import Race, Runner
from sage_plugin.tune.run.study import Study

logger = logging.getLogger(__name__)

TRIED_AGAIN = ("run_error", "timeout")
"""Failures that may have had another cause than the config: a later session tries it again."""

RACE_SHARE = 0.3
"""Part of a study's time that is left for its race."""


def tune(
    plan: TuningPlan,
    runner: Runner,
    observer: Observer | None = None,
    *,
    argv: Sequence[str] = (),
) -> TuneReport:
    """Run a plan: resume from its ledger, merge each winner as soon as it is known.

    Args:
        plan: from `plan.build`.
        runner: runs candidates; closed at the end.
        observer: follows how it goes.
        argv: the command, for the run's metadata.

    Raises:
        TuningError: no candidate of any study, the default included, passed the gate.
        ConfigError: the registry file is damaged; found before anything runs.
        OutputError: run folder or registry cannot be written; found before anything runs.
    """
    outcomes: list[Outcome] = []
    interrupted = False
    try:
        with run_folder.claimed(plan.run_folder):
            if plan.request.fresh:
                run_folder.set_aside(plan.run_folder)
            _merge(plan, ())
            write_metadata(plan, argv)
            session = _Session(plan, runner, observer or Observer())
            try:
                for study in plan.studies:
                    outcomes.append(session.run(study, len(plan.studies) - len(outcomes)))
                    write_results(plan, outcomes, session.ledger)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                write_results(plan, outcomes, session.ledger)
    finally:
        runner.close()
        plan.request.family.forget()
    report = TuneReport(plan, tuple(outcomes), interrupted)
    if not interrupted and len(report.failed) == len(plan.studies):
        reasons = "; ".join(dict.fromkeys(f"{o.study.kernel}: {o.notes[0]}" for o in outcomes))
        raise TuningError(
            f"no candidate passed, the default included, and the registry is unchanged: {reasons} "
            f"(every trial is in {plan.run_folder})"
        )
    return report


class _Session:
    def __init__(self, plan: TuningPlan, runner: Runner, observer: Observer) -> None:
        self.plan, self.runner, self.observer = plan, runner, observer
        self.ledger = Ledger(plan.run_folder / run_folder.LEDGER)
        self._crash_marker = CrashMarker(plan.run_folder / run_folder.CRASH_MARKER)
        self._started = time.monotonic()

    def run(self, study: Study, studies_left: int) -> Outcome:
        """Search, race, decide and merge one study."""
        share_s = self._share(studies_left)
        incumbent = self._incumbent(study)
        screens = self._screen(study, incumbent, share_s)
        finals = self._race(study, screens, incumbent, share_s)
        verdict = promote.decide(
            study,
            screens,
            finals,
            min_gain=self.plan.request.min_gain,
            run=self.plan.run_folder.name,
        )
        written = "" if verdict.entry is None else _merge(self.plan, (verdict.entry,))
        self.observer.study_finished(study, verdict.kind)
        return outcome_of(study, verdict, written, screens, finals)

    def _share(self, studies_left: int) -> float:
        budget_s = self.plan.request.limits.budget_s
        if budget_s is None:
            return float("inf")
        return max(0.0, budget_s - (time.monotonic() - self._started)) / studies_left

    def _incumbent(self, study: Study) -> LaunchConfig | None:
        """The config that a call like this gets now, if one was tuned for exactly this key."""
        family = self.plan.request.family
        match = lookup.find(
            study.key,
            facts=study.facts,
            config_dir=self.plan.registry_path.parents[1],
            is_legal=lambda c: family.illegal_reason(c, study.key, study.facts) is None,
        )
        return match.entry.config if match is not None and match.source == "exact" else None

    def _screen(
        self, study: Study, incumbent: LaunchConfig | None, share_s: float
    ) -> dict[LaunchConfig, Trial]:
        """Judge and briefly time configs until the space, a limit or the time is used up."""
        deadline = time.monotonic() + share_s * (1 - RACE_SHARE)
        limits = self.plan.request.limits
        former = self.ledger.trials(study.id, "screen")
        known = {c: trial for c, trial in former.items() if trial.status not in TRIED_AGAIN}
        queue = search.order(study.space, incumbent, self.plan.request.seed)
        total = min(len(queue), limits.max_trials or len(queue))
        done = sum(config in known for config in queue[:total])
        self.observer.study_started(study, done=done, total=total)
        screens: dict[LaunchConfig, Trial] = {}
        for config in queue:
            # What the registry holds has to be measured before it can lose its place.
            mandatory = config in (study.default, incumbent)
            if not mandatory and search.exhausted(screens.values(), limits):
                break
            if config not in known:
                if screens and not mandatory and time.monotonic() > deadline:
                    continue
                known[config] = self._try(study, config, screens.get(study.default))
            screens[config] = known[config]
        return screens

    def _try(self, study: Study, config: LaunchConfig, default: Trial | None) -> Trial:
        usable = default is None or default.status == "ok"
        try:
            trial = self._crash_marker.begin(study.id, config)
            if trial is None:
                trial = self.runner.screen(study, config, study.default if usable else None)
            trial = self.ledger.append(trial)
        finally:
            self._crash_marker.end()
        self.observer.trial_finished(study, trial)
        return trial

    def _race(
        self,
        study: Study,
        screens: dict[LaunchConfig, Trial],
        incumbent: LaunchConfig | None,
        share_s: float,
    ) -> dict[LaunchConfig, Trial]:
        """The finals of a study, from the ledger where the same configs were raced before."""
        configs = search.finalists(screens, study.default, incumbent)
        if not configs:
            return {}
        known = self.ledger.trials(study.id, "final")
        finals = {config: known[config] for config in configs if config in known}
        races = {trial.extra.get("finished_at") for trial in finals.values()}
        if len(finals) == len(configs) and len(races) == 1:
            return finals
        self.observer.race_started(study, len(configs))
        request = self.plan.request
        longest_s = min(study.timer.race_s, share_s * RACE_SHARE, request.timeout_s / 2)
        race = Race(configs, incumbent, max(MIN_BUDGET_S, longest_s), request.seed)
        finished = {"finished_at": time.time()}
        settled = run_final(self.runner, study, race)
        return {
            config: self.ledger.append(dataclasses.replace(trial, extra=trial.extra | finished))
            for config, trial in settled.items()
        }


def _merge(plan: TuningPlan, entries: tuple[RegistryEntry, ...]) -> str:
    """Merge into the registry; without entries this shows that it can be read and written."""
    if not plan.request.update:
        return "kept: measured only"
    report = merge(
        plan.registry_path,
        entries,
        family=plan.request.family.name,
        facts=plan.facts,
        toolchain=plan.studies[0].toolchain,
        min_gain=plan.request.min_gain,
    )
    for word, notes in (("added", report.added), ("replaced", report.replaced)):
        if notes:
            return word
    return f"kept: {report.kept[0][1]}" if report.kept else ""
