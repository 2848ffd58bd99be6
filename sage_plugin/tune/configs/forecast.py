"""How long a session takes, said before it starts; to a factor of two or three."""

from __future__ import annotations

from dataclasses import dataclass

from sage_plugin.errors import number_of
from sage_plugin.measure.cpu_rate import matmul_flops_per_s
from sage_plugin.tune.configs.plan import TuningPlan
from sage_plugin.tune.run.study import Study
from sage_plugin.tune.search.elimination import LOOKS
from sage_plugin.tune.search.search import BATCH, Search

GPU_FLOPS_PER_S = 3e14
"""Of quantized attention on a data-center GPU."""

EMULATION = 6.0
"""Time of an emulated call over that of plain matrix products of its size."""

COMPILE_S = {"hopper": 30.0, "portable": 12.0, "triton": 6.0}
"""One core's time for one config."""

START_S = 15.0
"""A child's start, and the exact output of each input, once a call."""

JUDGE_CALLS, JUDGE_S = 3, 0.3
"""Calls and seconds besides them that judging a config on one input takes."""

RACED = 4
"""Calls in a round of a race, on average."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a session will take.

    Attributes:
        seconds: all of it, at most the budget.
        calls: studies.
        configs: that are tried, of all studies together.
    """

    seconds: float
    calls: int
    configs: int

    def text(self) -> str:
        """Say it in one sentence."""
        minutes = self.seconds / 60
        time = f"{minutes:.0f} minutes" if minutes >= 1.5 else f"{max(5, self.seconds):.0f} seconds"
        return (
            f"about {time}: {number_of(self.configs, 'config')} of {number_of(self.calls, 'call')}"
        )


def forecast(plan: TuningPlan, *, num_workers: int) -> Forecast:
    """Predict how long a plan takes where no trial of it is known."""
    on_cpu = plan.facts.kind == "cpu"
    rate = matmul_flops_per_s() / EMULATION if on_cpu else GPU_FLOPS_PER_S
    total, tried = 0.0, 0
    for study in plan.studies:
        count = Search(study.space, limits=plan.request.limits).expected
        tried += count
        total += _seconds(study, count, rate, num_workers)
    total /= max(1, len(plan.request.gpus))
    return Forecast(min(total, plan.request.limits.budget_s or total), len(plan.studies), tried)


def _seconds(study: Study, tried: int, flops_per_s: float, num_workers: int) -> float:
    family, timer = study.timed.family, study.timer
    timed = study.timed.saved_shape if study.device == "cpu" else study.timed.shape
    call_s = family.flops(timed) / flops_per_s
    judged_s = sum(family.flops(s.saved_shape) / flops_per_s for s in study.sources)
    judge_s = JUDGE_CALLS * judged_s + JUDGE_S * len(study.sources)
    screen_s = min(timer.screen_s, (timer.screen_rounds + 1) * call_s) * (1 + 1 / BATCH)
    compile_s = COMPILE_S.get(study.key.variant, 0.0) / num_workers
    race_s = min(timer.race_s, RACED * LOOKS[len(LOOKS) // 2] * call_s)
    return START_S + tried * max(judge_s + screen_s, compile_s) + race_s
