"""A study without a device, and a runner whose candidates take, and do, what a test says."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from sage_plugin.capture.record import AttentionCapture
from sage_plugin.families.attention.gates import gate_for
from sage_plugin.measure.inputs import self_attention
from sage_plugin.measure.timing import Samples, TimingLimits, interleave
from sage_plugin.registry import load
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.schema import ErrorMetrics, LaunchConfig, Trial
from sage_plugin.tune.configs import trial as trials
from sage_plugin.tune.configs.inputs import TuningInputs
from sage_plugin.tune.configs.plan import TuningPlan, TuningRequest
from sage_plugin.tune.run.runner import Race
from sage_plugin.tune.run.study import Study, Timer
from sage_plugin.tune.search.elimination import LOOKS
from sage_plugin.tune.search.search import TOO_LARGE, SearchLimits
from tests.registry import samples

SHAPE = self_attention(1, 16, 1024, 64)
TIMER = Timer("events", screen_rounds=5, screen_s=1.0, race_rounds=20, race_s=1.0)


def space(count: int) -> tuple[LaunchConfig, ...]:
    """`count` legal configs that differ in their tile, warps and stages."""
    found = [
        samples.config(block_m=m, block_n=n, num_warps=w, num_stages=s)
        for w in (4, 8, 2, 1)
        for s in (2, 3, 1, 4)
        for m in (128, 64, 32, 16)
        for n in (64, 128, 32, 256)
    ]
    assert count <= len(found)
    return tuple(found[:count])


def study(configs: tuple[LaunchConfig, ...] | int = 8, *, synthetic: bool = False, **key) -> Study:
    """A study of one input."""
    source = ReplayInputs(SHAPE)
    if not synthetic:
        source = ReplayInputs(SHAPE, folder="/nowhere", record=CAPTURED)
    return Study(
        key=samples.key(**key),
        sources=(source,),
        timed=source,
        space=space(configs) if isinstance(configs, int) else configs,
        gate=gate_for("fav3_sage"),
        timer=TIMER,
        device="cuda:0",
        facts=samples.FACTS,
        toolchain=samples.TOOLCHAIN,
    )


def plan(folder: Path, *studies: Study, **request) -> TuningPlan:
    """A plan that writes below `folder`."""
    made = TuningRequest(
        inputs=TuningInputs(()),
        config_dir=folder / "configs",
        runs_dir=folder / "runs",
        **{"limits": SearchLimits(), **request},
    )
    return TuningPlan(
        request=made,
        studies=studies or (study(),),
        calls=(0,) * max(1, len(studies)),
        notes=(),
        facts=samples.FACTS,
        run_folder=folder / "runs" / (made.run_name or "run"),
        registry_path=folder / "configs" / samples.FACTS.slug / "attention.json",
    )


class ScriptedRunner:
    """Candidates take `speed(config)` milliseconds, times noise and drift.

    Args:
        speed: true time of a config.
        fails: status of configs that do not run; in the race they take all others down.
        noise: relative standard deviation of one sample.
        drift: factor on all times as a function of the number of samples taken before.
        seed: of the noise.
        before: called before each candidate, with the number of those so far.
        errors: errors of a config.
        too_large: statuses of failures that mean that a config did not fit.
    """

    def __init__(
        self,
        speed: Callable[[LaunchConfig], float] = lambda config: 1.0,
        *,
        fails: dict[LaunchConfig, str] | None = None,
        fails_in_race: dict[LaunchConfig, str] | None = None,
        noise: float = 0.0,
        drift: Callable[[int], float] = lambda n: 1.0,
        seed: int = 0,
        before: Callable[[int], None] = lambda n: None,
        errors: Callable[[LaunchConfig], ErrorMetrics] = lambda config: samples.ERRORS,
        too_large: tuple[str, ...] = (),
    ) -> None:
        self.speed, self.noise, self.drift = speed, noise, drift
        self.fails = {} if fails is None else fails
        self.fails_in_race = {} if fails_in_race is None else fails_in_race
        self.before = before
        self.screened: list[LaunchConfig] = []
        self.studies: set[str] = set()
        self.raced: list[tuple[LaunchConfig, ...]] = []
        self.errors, self.too_large = errors, too_large
        self.batches: list[tuple[LaunchConfig | None, tuple[LaunchConfig, ...]]] = []
        self.prepared: list[tuple[str, tuple[LaunchConfig, ...]]] = []
        self.closed = self.cancelled = False
        self._random = random.Random(seed)
        self._samples = 0

    def prepare(self, study: Study, configs) -> dict:
        self.prepared.append((study.id, tuple(configs)))
        return {}

    def judge(self, study: Study, config: LaunchConfig) -> Trial:
        self.before(len(self.screened))
        self.studies.add(study.id)
        self.screened.append(config)
        status = self.fails.get(config, "ok")
        reason = "" if status == "ok" else f"{status} as the script says"
        extra = {TOO_LARGE: 1.0} if status in self.too_large else {}
        errors = self.errors(config) if status == "ok" else None
        return Trial(study.id, config, "screen", status, reason=reason, errors=errors, extra=extra)

    def screen(self, study: Study, judged, base: LaunchConfig | None) -> tuple[Trial, ...]:
        configs = {trial.config: trial.config for trial in judged}
        if base is not None:
            configs[base] = base
        self.batches.append((base, tuple(trial.config for trial in judged)))
        times = self._times(configs, study.timer.screen_rounds)
        return trials.screened(tuple(judged), base, times)

    def race(self, study: Study, race: Race) -> tuple[Trial, ...]:
        self.raced.append(race.configs)
        bad = [c for c in race.configs if c in self.fails_in_race]
        if bad:
            status = self.fails_in_race[bad[0]]
            return tuple(
                Trial(study.id, c, "final", status, reason="the race died") for c in race.configs
            )
        names = {f"{i}": config for i, config in enumerate(race.configs)}
        names[trials.AGAIN] = race.configs[0]
        keep = trials.elimination_of(study.problem, race)
        return trials.finals_of(study.problem, race, self._times(names, LOOKS[-1], keep), False)

    def cancel(self) -> None:
        self.cancelled = True

    def close(self) -> None:
        self.closed = True

    def _times(self, names, rounds: int, keep=None) -> dict:
        """Times by name, interleaved as a device would be timed."""

        def run_round(drawn) -> list[float]:
            return [self._sample(names[name]) for name in drawn]

        limits = TimingLimits(0, 0.0, rounds, rounds, budget_s=float("inf"))
        seed = self._random.random()
        ms = interleave(list(names), run_round, limits=limits, seed=seed, keep=keep)
        return {name: Samples(str(name), tuple(taken), "events") for name, taken in ms.items()}

    def _sample(self, config: LaunchConfig) -> float:
        noise = max(0.01, self._random.gauss(1, self.noise))
        self._samples += 1
        return self.speed(config) * noise * self.drift(self._samples)


CAPTURED = AttentionCapture(
    schema_version=1, family="attention", file="000000.safetensors",
    layer="transformer.blocks.0.attn1", step=0, timestep=None, call_index=0, shape=SHAPE,
    batch_indices=(0,), head_indices=tuple(range(16)), strides_q=(1, 1, 1, 1),
    strides_k=(1, 1, 1, 1), strides_v=(1, 1, 1, 1), text_length=None, model_class="Tiny",
    config_hash="", versions={}, sha256="aa",
)  # fmt: skip


def faster(*winners, by: float = 0.2):
    """Speeds in which some configs take less than the 1 ms of all others."""
    return lambda config: 1 - by if config in winners else 1.0


def entries(plan) -> list:
    """What the registry of a plan holds."""
    return list(load.read(plan.registry_path).entries)
