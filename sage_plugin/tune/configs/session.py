"""A tuning session: every study searched, raced, decided and merged, whatever happens meanwhile."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from sage_plugin.errors import TuningError
from sage_plugin.kernels import launch_config
from sage_plugin.registry import lookup
from sage_plugin.registry.merge import merge
from sage_plugin.schema import AnyEntry, AnyLaunch, Trial
from sage_plugin.tune.configs import promote
from sage_plugin.tune.configs.outcome import (
    Outcome,
    TuneReport,
    outcome_of,
    unfinished,
    write_metadata,
    write_results,
)
from sage_plugin.tune.configs.plan import TuningPlan
from sage_plugin.tune.configs.study_search import Notebook, StudySearch
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run.crash_marker import CrashMarker
from sage_plugin.tune.run.ledger import Ledger
from sage_plugin.tune.run.observer import Observer
from sage_plugin.tune.run.runner import Runner
from sage_plugin.tune.run.study import Study
from sage_plugin.tune.run.terminated import sigterm_raises


def tune(
    plan: TuningPlan,
    runner: Runner,
    observer: Observer | None = None,
    *,
    argv: Sequence[str] = (),
    more_lanes: Sequence[Runner] = (),
) -> TuneReport:
    """Run a plan: resume from its ledger, merge each winner as soon as it is known.

    Args:
        plan: from `plan.build`.
        runner: runs candidates; closed at the end.
        observer: follows how it goes.
        argv: the command, for the run's metadata.
        more_lanes: runners on other devices of the same kind, which share the studies with the
            first; a study stays on one device, so that two are never compared.

    Raises:
        TuningError: no candidate of any study, the default included, passed the gate.
        ConfigError: the registry file is damaged; found before anything runs.
        OutputError: run folder or registry cannot be written; found before anything runs.
    """
    lanes = (runner, *more_lanes)
    interrupted = False
    try:
        with run_folder.claimed(plan.run_folder):
            if plan.request.fresh:
                run_folder.set_aside(plan.run_folder)
            _merge(plan, ())
            write_metadata(plan, argv)
            session = _Session(plan, observer or Observer())
            try:
                with sigterm_raises():
                    session.run(lanes)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                session.write()
    finally:
        for lane in lanes:
            lane.close()
        launch_config.forget()
    report = TuneReport(plan, session.outcomes, session.unfinished(), interrupted)
    if not interrupted and len(report.failed) == len(plan.studies):
        reasons = dict.fromkeys(f"{o.study.kernel}: {o.notes[0]}" for o in report.outcomes)
        raise TuningError(
            f"no candidate passed, the default included, and the registry is unchanged: "
            f"{'; '.join(reasons)} (every trial is in {plan.run_folder})"
        )
    return report


class _Session:
    """What the lanes of a session share: studies to do, the ledger, and what was decided."""

    def __init__(self, plan: TuningPlan, observer: Observer) -> None:
        self.plan = plan
        self._started = time.monotonic()
        self._lock = threading.RLock()
        self._left = deque(plan.studies)
        self._done: dict[str, Outcome] = {}
        self._lanes = 1
        ledger = Ledger(plan.run_folder / run_folder.LEDGER)
        marker = CrashMarker(plan.run_folder / run_folder.CRASH_MARKER)
        self.notebook = Notebook(ledger, observer, marker, self._related)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """What was decided, in the plan's order."""
        return tuple(self._done[s.id] for s in self.plan.studies if s.id in self._done)

    def unfinished(self) -> tuple[Outcome, ...]:
        """What is known of studies that were begun and not decided."""
        ledger = self.notebook.ledger
        left = [study for study in self.plan.studies if study.id not in self._done]
        begun = [(study, ledger.trials(study.id, "screen")) for study in left]
        return tuple(unfinished(study, self.plan.request, t) for study, t in begun if t)

    def run(self, lanes: Sequence[Runner]) -> None:
        """Do all studies, the next of them on whichever lane is free."""
        self._lanes = len(lanes)
        if len(lanes) == 1:
            self._lane(lanes[0])
            return
        with ThreadPoolExecutor(len(lanes), thread_name_prefix="lane") as pool:
            working = [pool.submit(self._lane, lane) for lane in lanes]
            try:
                for one in as_completed(working):
                    one.result()
            except BaseException:
                self._left.clear()
                for lane in lanes:
                    lane.cancel()
                raise

    def write(self) -> None:
        """Write the outputs of the run from what is known so far."""
        with self._lock:
            write_results(self.plan, self.outcomes, self.unfinished(), self.notebook.ledger)

    def _lane(self, runner: Runner) -> None:
        while True:
            with self._lock:
                if not self._left:
                    return
                study = self._left.popleft()
                following = self._left[0] if self._left else None
            lane = self._search(study, runner)
            lane.prepare()  # before what can wait
            if following is not None:  # compilers have work while this study is timed
                self._search(following, runner).prepare()
            outcome = self._decided(lane)
            with self._lock:
                self._done[study.id] = outcome
                self.write()
            self.notebook.observer.study_finished(study, outcome.verdict)

    def _search(self, study: Study, runner: Runner) -> StudySearch:
        request, incumbent = self.plan.request, self._incumbent(study)
        return StudySearch(study, runner, request, self.notebook, incumbent)

    def _decided(self, lane: StudySearch) -> Outcome:
        """Search, race, decide and merge one study."""
        study, trials = lane.study, lane.open()
        budget_s = self._share()  # counted from here: to start and to compile takes nobody's share
        lane.screen(trials, budget_s)
        finals = lane.race(trials, budget_s)
        verdict = promote.decide(
            study,
            trials,
            finals,
            min_gain=self.plan.request.min_gain,
            run=self.plan.run_folder.name,
        )
        written = "" if verdict.entry is None else _merge(self.plan, (verdict.entry,))
        return outcome_of(lane.search, study, verdict, written, trials, finals)

    def _share(self) -> float:
        """What a study that is being searched may take of the time that is left."""
        budget_s = self.plan.request.limits.budget_s
        if budget_s is None:
            return float("inf")
        left_s = max(0.0, budget_s - (time.monotonic() - self._started))
        return left_s / max(1.0, (1 + len(self._left)) / self._lanes)

    def _incumbent(self, study: Study) -> AnyLaunch | None:
        """The config that a call like this gets now, if one was tuned for exactly this key."""
        family = self.plan.request.family
        match = lookup.find(
            study.key,
            facts=study.facts,
            config_dir=self.plan.registry_path.parents[1],
            is_legal=lambda c: family.illegal_reason(c, study.key, study.facts) is None,
        )
        return match.entry.config if match is not None and match.source == "exact" else None

    def _related(self, study: Study) -> list[Trial]:
        """Trials of other studies of the same kernel."""
        others = [s for s in self.plan.studies if s.kernel == study.kernel and s.id != study.id]
        ledger = self.notebook.ledger
        return [t for other in others for t in ledger.trials(other.id, "screen").values()]


def _merge(plan: TuningPlan, entries: tuple[AnyEntry, ...]) -> str:
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
