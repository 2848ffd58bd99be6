"""Which configs to try next, when to stop, and which ones deserve the race; numbers only.

A large space is not walked through. A spread of its configs comes first, in which each value of
each axis occurs; then the neighbors of the best, one axis at a time, until no neighbor of the best
is left. Configs that cannot fit where a smaller one did not are never tried.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sage_plugin.schema import AnyLaunch, Trial

FINALISTS = 6
"""Configs in the race beside the default."""

SCREEN_BAND = 1.06
"""A config this much slower than the screen's best is not raced; wider than a screen's noise."""

IMPROVEMENT = 0.005
"""Relative gain that counts as an improvement for the early stop."""

BATCH = 8
"""Configs that are timed interleaved in a screen."""

SPREAD = 16
"""Configs of a large space that are tried before the search narrows."""

POOL = 512
"""A spread is chosen from so many at most."""

REFINED = 5
"""The best configs, whose neighbors are tried."""

TILE = ("block_m", "block_n", "block_k", "num_warps")
"""Fields that are chosen together: one axis."""

RECIPE = ("smooth_k", "smooth_v", "hadamard", "q_granule", "pv_flush", "exp_linear")
"""Fields that change errors, not how a kernel is launched; a spread keeps the default's."""

GROWS = ("block_m", "block_n", "block_k", "num_stages")
"""Fields with which a config needs more of what a GPU has."""

TOO_LARGE = "too_large"
"""Mark in a trial's `extra`: it did not fit (shared memory, memory) or did not end in time."""

Rank = Callable[[AnyLaunch], float]
"""Predicted relative time of a config: lower ones are tried first."""


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """When a search ends before its space does; `None` never.

    Attributes:
        max_trials: configs tried in a study, the default included.
        patience: valid trials in a row without a relative improvement; failures do not count.
        budget_s: seconds for the whole command.
        exhaustive: try every config of the space.
    """

    max_trials: int | None = None
    patience: int | None = None
    budget_s: float | None = None
    exhaustive: bool = False


@dataclass(frozen=True, slots=True)
class ErrorLimit:
    """How inexact a winner may be.

    Attributes:
        max_ratio: error over that of the default.
        max_error: largest error, `None` for the gate's alone.
    """

    max_ratio: float = 1.1
    max_error: float | None = None

    def allows(self, trial: Trial, default: Trial | None) -> bool:
        """Tell whether a valid trial is exact enough to win; the default always is, by ratio."""
        error = error_of(trial)
        if error is None:
            return True
        if self.max_error is not None and error > self.max_error:
            return False
        known = None if default is None or default.status != "ok" else error_of(default)
        return known is None or error <= known * self.max_ratio


def error_of(trial: Trial) -> float | None:
    """Return what accuracy is compared by: the centred relative L1 of the worst input."""
    return None if trial.errors is None else trial.errors.centred_rel_l1


@dataclass(frozen=True, slots=True)
class Search:
    """The search of one study: what to try next follows from what is known, and nothing else.

    Attributes:
        space: every config, the default first.
        incumbent: what the registry holds now.
        limits: when to stop early.
        error_limit: how inexact a winner may be.
        seed: of the order.
    """

    space: Sequence[AnyLaunch]
    incumbent: AnyLaunch | None = None
    limits: SearchLimits = field(default_factory=SearchLimits)
    error_limit: ErrorLimit = field(default_factory=ErrorLimit)
    seed: int = 0
    _by_axes: dict[tuple[object, ...], AnyLaunch] = field(init=False, repr=False)
    _values: list[list[object]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Index the space, which may be large, by its axes."""
        by_axes = {_axes(config): config for config in self.space}
        values = [list(dict.fromkeys(axis)) for axis in zip(*by_axes, strict=True)]
        object.__setattr__(self, "_by_axes", by_axes)
        object.__setattr__(self, "_values", values)

    @property
    def first(self) -> tuple[AnyLaunch, ...]:
        """What is measured whatever the limits: the default, and what the registry holds now."""
        held = self.incumbent
        return (self.space[0],) if held in (None, self.space[0]) else (self.space[0], held)

    @property
    def expected(self) -> int:
        """How many configs the search tries, about."""
        count = len(self.space)
        if not self.limits.exhaustive:
            others = sum(len(values) - 1 for values in self._values)
            count = min(count, len(self.first) + SPREAD + REFINED * others)
        return min(count, self.limits.max_trials or count)

    def propose(
        self, trials: Mapping[AnyLaunch, Trial], rank: Rank | None = None
    ) -> list[AnyLaunch]:
        """Return up to a batch of configs to try next; none ends the search."""
        if missing := [config for config in self.first if config not in trials]:
            return missing
        room = self._room(trials)
        if room <= 0:
            return []
        large = _large(trials)
        for wanted in self._stages(trials):
            left = [c for c in wanted if c not in trials and not skip_reason(c, large)]
            if left:
                return sorted(left, key=rank)[:room] if rank else left[:room]
        return []

    def _stages(self, trials: Mapping[AnyLaunch, Trial]) -> Iterator[list[AnyLaunch]]:
        """What to try, stage by stage; a stage begins where the one before is done."""
        few = SPREAD + len(self.first)
        if self.limits.exhaustive or len(self.space) <= few:
            yield self._shuffled()
            return
        if len(trials) < few:  # it takes a while, and is done once so many were tried
            yield spread(self.space, SPREAD, self.seed)
        yield self._neighbors(trials)

    def skipped(self, trials: Mapping[AnyLaunch, Trial]) -> list[AnyLaunch]:
        """List what is never tried because a smaller config did not fit."""
        large = _large(trials)
        return [c for c in self.space if c not in trials and skip_reason(c, large)]

    def allowed(self, trials: Mapping[AnyLaunch, Trial]) -> list[Trial]:
        """List the valid trials that are exact enough to win, the fastest first."""
        default = trials.get(self.space[0])
        valid = [t for t in trials.values() if t.status == "ok"]
        return sorted((t for t in valid if self.error_limit.allows(t, default)), key=ratio)

    def finalists(self, trials: Mapping[AnyLaunch, Trial]) -> tuple[AnyLaunch, ...]:
        """List the configs to race, the default first if it may win; empty if none may.

        The few best of the screen, of many only those within its band, and what the registry holds
        now, since an entry is only replaced by what beats it in the same race.
        """
        default, allowed = self.space[0], self.allowed(trials)
        if not allowed:
            return ()
        challengers = [trial for trial in allowed if trial.config != default]
        if len(challengers) > FINALISTS:
            band = ratio(allowed[0]) * SCREEN_BAND
            challengers = [trial for trial in challengers if ratio(trial) <= band]
        chosen = [trial.config for trial in challengers[:FINALISTS]]
        usable = {t.config for t in allowed}
        if self.incumbent in usable and self.incumbent not in (default, *chosen):
            chosen.append(self.incumbent)
        return (default, *chosen) if default in usable else tuple(chosen)

    def _room(self, trials: Mapping[AnyLaunch, Trial]) -> int:
        """How many more configs the limits allow, at most a batch."""
        room = BATCH
        if self.limits.max_trials is not None:
            room = min(room, self.limits.max_trials - len(trials))
        if self.limits.patience is not None:
            room = min(room, self.limits.patience - _stale(trials.values()))
        return room

    def _shuffled(self) -> list[AnyLaunch]:
        """All in a seeded order: a search that is cut short must not leave a corner out."""
        return random.Random(self.seed).sample(self.space, len(self.space))

    def _neighbors(self, trials: Mapping[AnyLaunch, Trial]) -> list[AnyLaunch]:
        """Configs that differ from one of the best in one axis, those of the best first."""
        found: dict[AnyLaunch, None] = {}
        for trial in self.allowed(trials)[:REFINED]:
            own = _axes(trial.config)
            for at, values in enumerate(self._values):
                for value in values:
                    other = self._by_axes.get((*own[:at], value, *own[at + 1 :]))
                    if other is not None and value != own[at]:
                        found[other] = None
        return list(found)


def skip_reason(config: AnyLaunch, large: Sequence[Trial]) -> str | None:
    """Say which smaller config did not fit, so that this one cannot; `None` where none did."""
    for trial in large:
        if _is_larger(config, trial.config):
            return f"larger than {trial.config.text()}, which did not fit: {trial.reason}"
    return None


def _large(trials: Mapping[AnyLaunch, Trial]) -> list[Trial]:
    return [trial for trial in trials.values() if trial.extra.get(TOO_LARGE)]


def spread(space: Sequence[AnyLaunch], count: int, seed: int) -> list[AnyLaunch]:
    """Choose configs so that each value of each axis occurs as evenly as a few allow.

    Those that keep the default's recipe come before all others: what changes errors is tried on the
    best launch, not on each.
    """
    names = [name for name in RECIPE if hasattr(space[0], name)]
    recipe = [getattr(space[0], name) for name in names]
    plain = [c for c in space if [getattr(c, name) for name in names] == recipe]
    order = random.Random(seed)
    pool = order.sample(plain, min(POOL, len(plain)))
    seen: dict[tuple[int, object], int] = {}
    chosen: list[AnyLaunch] = []
    axes = {config: _axes(config) for config in pool}

    def crowded(config: AnyLaunch) -> int:
        return sum(seen.get(pair, 0) for pair in enumerate(axes[config]))

    while pool and len(chosen) < count:
        config = min(pool, key=crowded)
        pool.remove(config)
        chosen.append(config)
        for pair in enumerate(axes[config]):
            seen[pair] = seen.get(pair, 0) + 1
    return chosen


Values = Callable[[AnyLaunch], tuple[object, ...]]


@functools.cache
def _values_of(kind: Any) -> tuple[Values, Values]:  # noqa: ANN401
    """What reads the tile of a family's configs, and their other fields."""
    names = [one.name for one in dataclasses.fields(kind)]
    tile = [name for name in names if name in TILE]
    return operator.attrgetter(*tile), operator.attrgetter(*(n for n in names if n not in tile))


def _axes(config: AnyLaunch) -> tuple[object, ...]:
    """A config as its values on the axes, the tile as one of them."""
    kind: Any = type(config)
    tile, rest = _values_of(kind)
    return (tile(config), *rest(config))


def _is_larger(config: AnyLaunch, other: AnyLaunch) -> bool:
    """Whether a config needs at least as much of everything, and differs in nothing else."""
    for one in dataclasses.fields(config):
        own, others = getattr(config, one.name), getattr(other, one.name)
        if own < others if one.name in GROWS else own != others:
            return False
    return config != other


def ratio(trial: Trial) -> float:
    """Return the time relative to the default of the same measurement; infinite if it failed."""
    return trial.extra.get("ratio", float("inf")) if trial.status == "ok" else float("inf")


def _stale(trials: Iterable[Trial]) -> int:
    """Valid trials since the last improvement, in the order of the trials."""
    best, stale = float("inf"), 0
    for trial in trials:
        if trial.status != "ok":
            continue
        stale += 1
        if ratio(trial) < best * (1 - IMPROVEMENT):
            stale = 0
        best = min(best, ratio(trial))
    return stale


def edges(config: AnyLaunch, space: Sequence[AnyLaunch]) -> tuple[str, ...]:
    """Name the numeric fields in which a config is the smallest or largest of its space."""
    found = []
    for name, value in config.to_json().items():
        values = sorted({getattr(other, name) for other in space})
        if isinstance(value, bool) or not isinstance(value, int) or len(values) < 3:
            continue
        for extreme, word in ((values[0], "smallest"), (values[-1], "largest")):
            if value == extreme and value != 0:
                found.append(f"{name} {value} is the {word} that was searched")
    return tuple(found)
