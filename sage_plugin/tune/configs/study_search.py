"""One study, searched and raced: what is tried when, and what becomes of each trial."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sage_plugin.schema import AnyLaunch, Trial
from sage_plugin.tune.configs.plan import TuningRequest
from sage_plugin.tune.run.crash_marker import CrashMarker
from sage_plugin.tune.run.ledger import Ledger
from sage_plugin.tune.run.observer import Observer
from sage_plugin.tune.run.runner import Race, Runner
from sage_plugin.tune.run.study import Study
from sage_plugin.tune.search.learned_order import learned
from sage_plugin.tune.search.search import Rank, Search, ratio

logger = logging.getLogger(__name__)

TRIED_AGAIN = ("run_error", "timeout")
"""Failures that may have had another cause than the config: a later session tries it again."""

MIN_BUDGET_S = 1.0
RACE_SHARE = 0.3
"""Part of a study's time that is left for its race."""

PENDING, PASSED_OVER = "pending", "passed_over"
"""States of a config that no ledger holds: being tried now, and left out after ended sessions."""

Trials = dict[AnyLaunch, Trial]


@dataclass(frozen=True, slots=True)
class Notebook:
    """Where a session writes down what happens, and reads what happened before.

    Attributes:
        ledger: every trial.
        observer: who follows.
        marker: what runs right now; `None` where nothing can end the session.
        related: trials of other studies that teach an order.
    """

    ledger: Ledger
    observer: Observer
    marker: CrashMarker | None = None
    related: Callable[[Study], Iterable[Trial]] = lambda _: ()


class StudySearch:
    """The search of one study by one runner."""

    def __init__(
        self,
        study: Study,
        runner: Runner,
        request: TuningRequest,
        notebook: Notebook,
        incumbent: AnyLaunch | None = None,
    ) -> None:
        self.study, self.runner, self.request, self.notebook = study, runner, request, notebook
        self.search = Search(
            study.space, incumbent, request.limits, request.error_limit, request.seed
        )

    def prepare(self) -> None:
        """Have the configs that open the search compiled, before it is this study's turn."""
        known = self._known()
        self._prepare(self.search.propose(known), known)

    def open(self) -> Trials:
        """Judge and time what is measured whatever the limits, and add what is known before."""
        trials = self._known()
        done, total = len(trials), self.search.expected
        self.notebook.observer.study_started(self.study, done=done, total=max(done, total))
        if missing := [config for config in self.search.first if config not in trials]:
            self._try(missing, trials, float("inf"))
        return trials

    def screen(self, trials: Trials, budget_s: float = float("inf")) -> None:
        """Judge and briefly time more configs until search, limits or time end."""
        deadline = time.monotonic() + budget_s * (1 - RACE_SHARE)
        while batch := self.search.propose(trials, self._rank(trials)):
            if time.monotonic() > deadline:
                break
            self._try(batch, trials, deadline)

    def race(self, trials: Trials, budget_s: float = float("inf")) -> Trials:
        """Race the finalists; from the ledger where the same ones were raced before."""
        configs = self.search.finalists(trials)
        if not configs:
            return {}
        study, request = self.study, self.request
        known = self.notebook.ledger.trials(study.id, "final")
        finals = {config: known[config] for config in configs if config in known}
        races = {trial.extra.get("finished_at") for trial in finals.values()}
        # Who cannot win much leaves early: such a race does not tell who wins a little.
        asked = max((t.extra.get("min_gain", 0.0) for t in finals.values()), default=0.0)
        if len(finals) == len(configs) and len(races) == 1 and asked <= request.min_gain:
            return finals
        self.notebook.observer.race_started(study, len(configs))
        longest_s = min(study.timer.race_s, budget_s * RACE_SHARE, request.timeout_s / 2)
        race = Race(
            configs,
            self.search.incumbent,
            max(MIN_BUDGET_S, longest_s),
            request.seed,
            request.min_gain if configs[0] == study.default else None,
        )
        finished = {"finished_at": time.time()}
        settled = run_final(self.runner, study, race)
        return {
            config: self._note(dataclasses.replace(trial, extra=trial.extra | finished))
            for config, trial in settled.items()
        }

    def _rank(self, trials: Trials) -> Rank | None:
        compiled = self.runner.prepare(self.study, ())
        related = [*trials.values(), *self.notebook.related(self.study)]
        return learned(related, compiled)

    def _try(self, batch: Sequence[AnyLaunch], trials: Trials, deadline: float) -> None:
        """Judge a batch one by one until the time is up, and time together what passes."""
        self._prepare(batch, trials)
        passed: list[Trial] = []
        for config in batch:
            if passed and time.monotonic() > deadline:
                break
            trial = self._judged(config)
            if trial.status == "ok":
                passed.append(trial)
            else:
                trials[config] = trial
                self.notebook.observer.trial_finished(self.study, trial)
        if not passed:
            return
        base = self._base([*trials.values(), *passed])
        for trial in self.runner.screen(self.study, passed, base):
            trials[trial.config] = self._note(trial)
            self.notebook.observer.trial_finished(self.study, trial)

    def _known(self) -> Trials:
        """What former sessions tried and need not try again."""
        former = self.notebook.ledger.trials(self.study.id, "screen")
        return {c: trial for c, trial in former.items() if trial.status not in TRIED_AGAIN}

    def _prepare(self, batch: Sequence[AnyLaunch], trials: Trials) -> None:
        """Have a batch compiled, and what would be tried behind it as far as is known now."""
        pending = {c: Trial(self.study.id, c, "screen", PENDING) for c in batch}
        upcoming = self.search.propose(trials | pending, self._rank(trials))
        self.runner.prepare(self.study, [*batch, *upcoming])

    def _judged(self, config: AnyLaunch) -> Trial:
        study, marker = self.study, self.notebook.marker
        if marker is not None and not marker.begin(study.id, config):
            reason = "earlier sessions were ended while it ran; --fresh tries it again"
            return Trial(study.id, config, "screen", PASSED_OVER, reason=reason)
        try:
            trial = self.runner.judge(study, config)
            return trial if trial.status == "ok" else self._note(trial)
        finally:
            if marker is not None:
                marker.end(study.id, config)

    def _base(self, trials: Sequence[Trial]) -> AnyLaunch:
        """What times are compared with: the default, or the first valid config without it."""
        valid = [trial.config for trial in trials if trial.status == "ok"]
        return self.study.default if self.study.default in valid else valid[0]

    def _note(self, trial: Trial) -> Trial:
        trial = self.notebook.ledger.append(trial)
        text = trial.reason or (f"ratio {ratio(trial):.4f}" if trial.stage == "screen" else "")
        logger.info("%s %s %s: %s", trial.stage, trial.status, trial.config.text(), text)
        return trial


def run_final(runner: Runner, study: Study, race: Race) -> Trials:
    """Race the finalists; where the race breaks, race each one alone with the first.

    A process that dies says nothing about which of its configs was to blame. Pairs do, and a pair
    is still an interleaved comparison with the baseline.
    """
    settled = _raced(runner, study, race)
    if all(trial.status == "ok" for trial in settled.values()):
        return settled
    first, *challengers = race.configs
    budget_s = max(MIN_BUDGET_S, race.budget_s / len(race.configs))
    apart = dataclasses.replace(race, incumbent=None, budget_s=budget_s)
    if len(challengers) > 1:
        for challenger in challengers:
            pair = _raced(runner, study, dataclasses.replace(apart, configs=(first, challenger)))
            settled[challenger] = pair[challenger]
            if pair[first].status == "ok":
                settled[first] = pair[first]
    if challengers and settled[first].status != "ok":
        settled |= _raced(runner, study, dataclasses.replace(apart, configs=(first,)))
    return settled


def _raced(runner: Runner, study: Study, race: Race) -> Trials:
    return {trial.config: trial for trial in runner.race(study, race)}
