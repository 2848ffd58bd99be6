"""What was measured: the error of options on captures, and their times on shapes.

Each measurement is a line of a ledger, so that a search that was interrupted goes on from there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from sage_plugin import device as devices
from sage_plugin.accuracy.gate import failures
from sage_plugin.capture.record import CaptureRecord
from sage_plugin.capture.store.reader import CaptureFolder
from sage_plugin.errors import CaptureError
from sage_plugin.families import family
from sage_plugin.families.family import ReplayCall
from sage_plugin.families.linear.balance import Balance
from sage_plugin.families.linear.replay import LinearReplay
from sage_plugin.measure.timing import TimingLimits, measure
from sage_plugin.plugin.linears.smoothing import Smoothing
from sage_plugin.plugin.policy.rules import BASELINES
from sage_plugin.replay.inputs import ReplayInputs, runs
from sage_plugin.schema import (
    AnyLaunch,
    AnyShape,
    DeviceFacts,
    Trial,
)
from sage_plugin.tune.policy.option import Option, Runnable
from sage_plugin.tune.run.ledger import Ledger
from sage_plugin.tune.run.study import digest

logger = logging.getLogger(__name__)

ERRORS, TIMES = "screen", "final"
"""Stages of the ledger: an option judged on a capture, and timed on a shape."""

MS = "ms "
"""In front of an option's label, the milliseconds of a call in the ledger's `extra`."""

TIMING = TimingLimits(
    warmup=2, warmup_s=0.1, min_samples=8, max_samples=60, budget_s=4.0, precision=0.01
)


class PolicyEvidence:
    """Measures options on one device.

    Attributes:
        facts: the device.
    """

    def __init__(
        self,
        captures: CaptureFolder,
        device: str,
        config_dir: str | None,
        ledger: Path,
        smoothing: Smoothing | None = None,
    ) -> None:
        self.facts: DeviceFacts = devices.facts(device)
        self._folder, self._device, self._config_dir = str(captures.path), device, config_dir
        self._ledger = Ledger(ledger)
        self._identity = [self.facts.to_json(), devices.toolchain().to_json()]
        self._smoothing = smoothing
        self._loaded: tuple[str, ReplayCall] | None = None

    def error(self, record: CaptureRecord, option: Option) -> float | str:
        """Return the centred error of the worst head, or block of rows, or why it may not run."""
        runnable = option.runnable(record.shape, self.facts, self._config_dir)
        if isinstance(runnable, str):
            return runnable
        balance = self._balance(option, record)
        if isinstance(balance, str):
            return balance
        of_channels = [] if balance is None else [option.label, balance.digest()]
        study = digest([ERRORS, record.sha256, runnable[0].label, *of_channels, self._identity])
        trial = self._ledger.trials(study, ERRORS).get(self._noted(record.shape, runnable))
        if trial is None or trial.status == "run_error":  # which may have had another cause
            trial = self._ledger.append(self._judged(study, record, runnable, balance))
        if trial.status != "ok" or trial.errors is None:
            return trial.reason
        error = trial.errors.worst_head_centred_rel_l1
        return trial.errors.centred_rel_l1 if error is None else error

    def times(
        self, shape: AnyShape, record: CaptureRecord | None, options: Sequence[Option]
    ) -> dict[str, float]:
        """Time a call of this shape in milliseconds, by label, with the baseline of its family.

        All are timed interleaved, with quantisation; what cannot run is left out.
        """
        runnable = {o.label: o.runnable(shape, self.facts, self._config_dir) for o in options}
        balances = {o.label: self._balance(o, record) for o in options}
        able = {
            label: r
            for label, r in runnable.items()
            if not isinstance(r, str) and not isinstance(balances[label], str)
        }
        wanted = sorted(
            (label, decision.label, "" if config is None else config.text())
            for label, (decision, config) in able.items()
        )
        study = digest([TIMES, shape.to_json(), wanted, self._identity])
        known = list(self._ledger.trials(study, TIMES).values())
        if not able:
            return {}
        trial = (
            known[0]
            if known
            else self._ledger.append(self._timed(study, shape, record, able, balances))
        )
        return {name.removeprefix(MS): ms for name, ms in trial.extra.items()}

    def _balance(self, option: Option, record: CaptureRecord | None) -> Balance | str | None:
        """What an option does to the input channels of a linear, or why it cannot.

        Without a record, whose factors are known, channels are divided by 1, in the same time.
        """
        if not (option.rotation or option.smoothing):
            return None
        if not option.smoothing or record is None:
            return Balance(option.rotation)
        smooth = None if self._smoothing is None else self._smoothing.of(record.layer)
        if smooth is None:
            return f"there are no smoothing factors of {record.layer}"
        return Balance(option.rotation, smooth)

    def _judged(
        self, study: str, record: CaptureRecord, runnable: Runnable, balance: Balance | None
    ) -> Trial:
        decision, config = runnable
        noted = self._noted(record.shape, runnable)
        try:
            errors = balanced(self._saved(record), balance).errors(decision, config)
        except (RuntimeError, ValueError) as error:  # one option must not end the search
            if isinstance(error, CaptureError):
                raise
            logger.debug("%s failed on %s", decision.label, record.file, exc_info=True)
            reason = f"{decision.label} failed: {(str(error).splitlines() or ['no message'])[0]}"
            return Trial(study, noted, ERRORS, "run_error", reason=reason[:500])
        broken = failures(family(record.family).gate_for(decision.kernel), errors)
        status = "gate_failed" if broken else "ok"
        return Trial(study, noted, ERRORS, status, reason="; ".join(broken), errors=errors)

    def _saved(self, record: CaptureRecord) -> ReplayCall:
        """A capture's tensors; the last ones are kept, since all options are judged on them."""
        if self._loaded is None or self._loaded[0] != record.sha256:
            self._loaded = None
            self._loaded = (record.sha256, self._inputs(record).load(self._device))
        return self._loaded[1]

    def _inputs(self, record: CaptureRecord) -> ReplayInputs:
        return ReplayInputs(record.shape, folder=self._folder, record=record)

    def _timed(
        self,
        study: str,
        shape: AnyShape,
        record: CaptureRecord | None,
        able: dict[str, Runnable],
        balances: Mapping[str, Balance | str | None],
    ) -> Trial:
        """One trial that holds the medians of all options."""
        self._loaded = None
        drawn = ReplayInputs(shape)
        inputs = drawn if record is None else self._inputs(record)
        timed = inputs.timed(inputs.load(self._device), self._device)
        calls = {label: balanced(timed, balances[label]).whole(*one) for label, one in able.items()}
        calls = {BASELINES[shape.family]: timed.whole(), **calls}
        calls = {label: call for label, call in calls.items() if runs(call)}
        samples = measure(calls, device=self._device, limits=TIMING) if calls else {}
        extra = {f"{MS}{name}": sample.timing().median_ms for name, sample in samples.items()}
        noted = self._noted(shape, next(iter(able.values())))
        return Trial(study, noted, TIMES, "ok", extra=extra)

    def _noted(self, shape: AnyShape, runnable: Runnable) -> AnyLaunch:
        """The config that the ledger holds: the default where torch's product has none."""
        decision, config = runnable
        if config is not None:
            return config
        one = family(shape.family)
        noted: AnyLaunch = one.default_launch(one.call_key(shape, decision), self.facts)
        return noted


def balanced(call: ReplayCall, balance: Balance | str | None) -> ReplayCall:
    """Return a call whose input channels are balanced, where an option does that to linears."""
    if not isinstance(balance, Balance):
        return call
    assert isinstance(call, LinearReplay), "only linears are balanced"
    return call.balanced(balance)
