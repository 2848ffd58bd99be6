"""In which order candidates are tried, learned from what was measured: an order, never a cut.

A linear model of the logarithm of relative times, over the fields of a config and over what the
compiler says of it where that is known. Spilled registers are not held against a config beyond what
the trials so far say of them: the fastest config of a card may spill.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping

import torch

from sage_plugin.schema import AnyLaunch, Trial
from sage_plugin.tune.run.runner import Resources
from sage_plugin.tune.search.search import Rank, ratio

FEWEST = 12
"""Trials from which an order is learned."""

RIDGE = 0.3
"""Weight of the penalty on coefficients, so that few trials do not teach much."""

UNKNOWN = Resources()


def learned(trials: Iterable[Trial], compiled: Mapping[AnyLaunch, Resources]) -> Rank | None:
    """Return the predicted log of a config's relative time; `None` where too little is known."""
    valid = [t for t in trials if t.stage == "screen" and 0 < ratio(t) < math.inf]
    if len(valid) < FEWEST:
        return None
    groups: dict[str, list[Trial]] = {}
    for trial in valid:
        groups.setdefault(trial.study, []).append(trial)
    rows, wanted = [], []
    for group in groups.values():  # a study's own level says nothing about its configs
        logs = [math.log(ratio(trial)) for trial in group]
        center = sum(logs) / len(logs)
        wanted += [value - center for value in logs]
        rows += [_features(trial.config, _resources(trial)) for trial in group]
    x = torch.tensor(rows, dtype=torch.float64)
    mean, scale = x.mean(0), x.std(0).clamp_min(1e-9)
    x = (x - mean) / scale
    penalty = RIDGE * len(rows) ** 0.5 * torch.eye(x.shape[1], dtype=torch.float64)
    y = torch.tensor(wanted, dtype=torch.float64)
    weights = torch.linalg.solve(x.T @ x + penalty, x.T @ y)
    known = {trial.config: _resources(trial) for trial in valid} | dict(compiled)

    def rank(config: AnyLaunch) -> float:
        own = torch.tensor(_features(config, known.get(config, UNKNOWN)), dtype=torch.float64)
        return float(((own - mean) / scale) @ weights)

    return rank


def _resources(trial: Trial) -> Resources:
    return Resources(trial.registers, trial.spills, trial.smem_bytes)


def _features(config: AnyLaunch, resources: Resources) -> list[float]:
    """Fields as numbers, sizes by their logarithm; what is unknown stands at a middle value."""
    found = []
    for value in operator.attrgetter(*config.__dataclass_fields__)(config):
        is_text = isinstance(value, str)
        found.append(float(value == "descriptor") if is_text else math.log2(1 + value))
    registers, spilled, smem = resources.registers, resources.spill_bytes, resources.smem_bytes
    found.append(math.log2(128 if registers is None else max(1, registers)))
    found.append(math.log2(1 + (spilled or 0)))
    found.append(math.log2(2**16 if smem is None else max(1, smem)))
    return found
