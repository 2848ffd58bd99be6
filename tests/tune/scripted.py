"""A study without a device, and a runner whose candidates take, and do, what a test says."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from sage_plugin.families.attention.gates import gate_for
from sage_plugin.measure.timing import Samples
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.schema import CallShape, LaunchConfig, Trial
from sage_plugin.tune.configs import trial as trials
from sage_plugin.tune.configs.inputs import TuningInputs
from sage_plugin.tune.configs.plan import TuningPlan, TuningRequest
from sage_plugin.tune.configs.search import SearchLimits
from sage_plugin.tune.run.runner import Race
from sage_plugin.tune.run.study import Study, Timer
from tests.registry import samples

SHAPE = CallShape(
    batch=1,
    heads_q=16,
    heads_k=16,
    seq_q=1024,
    seq_k=1024,
    head_dim=64,
    dv=64,
    dtype="bfloat16",
    causal=False,
    mask_kind="none",
    layout="bhsd",
    scale=0.125,
)
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
        before: called before each screen, with the number of screens so far.
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
    ) -> None:
        self.speed, self.noise, self.drift = speed, noise, drift
        self.fails = {} if fails is None else fails
        self.fails_in_race = {} if fails_in_race is None else fails_in_race
        self.before = before
        self.screened: list[LaunchConfig] = []
        self.raced: list[tuple[LaunchConfig, ...]] = []
        self.closed = False
        self._random = random.Random(seed)
        self._samples = 0

    def screen(self, study: Study, config: LaunchConfig, base: LaunchConfig | None) -> Trial:
        self.before(len(self.screened))
        self.screened.append(config)
        if status := self.fails.get(config):
            reason = f"{status} as the script says"
            return Trial(study.id, config, "screen", status, reason=reason)
        names = {trials.NEW: config}
        if base is not None and base != config:
            names[trials.BASE] = base
        times = self._times(names, study.timer.screen_rounds)
        ratio = trials._ratio(times, compared=base is not None)
        return Trial(
            study.id,
            config,
            "screen",
            "ok",
            time=times[trials.NEW].timing(),
            errors=samples.ERRORS,
            extra={"ratio": ratio},
        )

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
        times = self._times(names, study.timer.race_rounds)
        return trials._finals(study, race, times, False)

    def close(self) -> None:
        self.closed = True

    def _times(self, names: dict[str, LaunchConfig], rounds: int) -> dict[str, Samples]:
        taken: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in self._random.sample(sorted(names), len(names)):
                noise = max(0.01, self._random.gauss(1, self.noise))
                taken[name].append(self.speed(names[name]) * noise * self.drift(self._samples))
                self._samples += 1
        return {name: Samples(name, tuple(ms), "events") for name, ms in taken.items()}


def _captured():
    from sage_plugin.schema import CaptureRecord

    return CaptureRecord(
        schema_version=1,
        family="attention",
        file="000000.safetensors",
        layer="transformer.blocks.0.attn1",
        step=0,
        timestep=None,
        call_index=0,
        shape=SHAPE,
        batch_indices=(0,),
        head_indices=tuple(range(16)),
        strides_q=(1, 1, 1, 1),
        strides_k=(1, 1, 1, 1),
        strides_v=(1, 1, 1, 1),
        text_length=None,
        model_class="Tiny",
        config_hash="",
        versions={},
        sha256="aa",
    )


CAPTURED = _captured()
