"""Lanes on the machines of a Ray cluster: an actor for each GPU, one ledger here.

Every trial comes back to the one process that writes; captures have to be at the same path on all
machines, and `sage-plugin` installed there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sage_plugin import device as devices
from sage_plugin.errors import DeviceError, UsageError
from sage_plugin.schema import AnyLaunch, DeviceFacts, Trial
from sage_plugin.tune.configs.compile_pool import CompilePool, default_workers
from sage_plugin.tune.configs.plan import TuningPlan
from sage_plugin.tune.configs.subprocess_runner import SubprocessRunner
from sage_plugin.tune.run.runner import Race, Resources, Runner
from sage_plugin.tune.run.study import Study


class RayLane:
    """What an actor holds: a lane on the one GPU that Ray gave it."""

    def __init__(self, timeout_s: float, num_workers: int | None) -> None:
        pool = None
        if self.facts().kind != "cpu":
            pool = CompilePool(num_workers or default_workers(), timeout_s=timeout_s)
        self._runner = SubprocessRunner(timeout_s=timeout_s, pool=pool)

    def facts(self) -> DeviceFacts:
        """Say what runs here."""
        return devices.chosen(None)[1]

    def call(self, name: str, study: Study, *rest: object) -> Any:  # noqa: ANN401
        """Run a method of the lane."""
        if study.device != "cpu":
            study = dataclasses.replace(study, device="cuda:0")
        return getattr(self._runner, name)(study, *rest)


class RayRunner:
    """A lane elsewhere. A machine that is lost costs the trial that it ran; Ray starts another."""

    def __init__(self, ray: Any, actor: Any) -> None:  # noqa: ANN401
        self._ray, self._actor = ray, actor
        self._cancelled = False
        self._sent: tuple[str, Any] = ("", None)

    def prepare(self, study: Study, configs: Sequence[AnyLaunch]) -> Mapping[AnyLaunch, Resources]:
        """Take note as `Runner` says."""
        found: Mapping[AnyLaunch, Resources] | str = self._call("prepare", study, tuple(configs))
        return {} if isinstance(found, str) else found

    def judge(self, study: Study, config: AnyLaunch) -> Trial:
        """Judge as `Runner` says."""
        found: Trial | str = self._call("judge", study, config)
        return _lost(study, config, "screen", found) if isinstance(found, str) else found

    def screen(
        self, study: Study, judged: Sequence[Trial], base: AnyLaunch | None
    ) -> tuple[Trial, ...]:
        """Screen as `Runner` says."""
        found: tuple[Trial, ...] | str = self._call("screen", study, tuple(judged), base)
        if isinstance(found, str):
            return tuple(_lost(study, one.config, "screen", found) for one in judged)
        return found

    def race(self, study: Study, race: Race) -> tuple[Trial, ...]:
        """Race as `Runner` says."""
        found: tuple[Trial, ...] | str = self._call("race", study, race)
        if isinstance(found, str):
            return tuple(_lost(study, config, "final", found) for config in race.configs)
        return found

    def cancel(self) -> None:
        """End the actor; who waits for it hears of Ctrl-C."""
        self._cancelled = True
        self._ray.kill(self._actor)

    def close(self) -> None:
        """End the actor, and with it what it started."""
        self._ray.kill(self._actor)

    def _call(self, name: str, study: Study, *rest: object) -> Any:  # noqa: ANN401
        """What the lane answers, or why there is no answer."""
        if self._sent[0] != study.id:  # its space is large: it goes there once
            self._sent = (study.id, self._ray.put(study))
        try:
            return self._ray.get(self._actor.call.remote(name, self._sent[1], *rest))
        except self._ray.exceptions.RayError as error:
            if self._cancelled:
                raise KeyboardInterrupt from None
            return f"the lane was lost: {str(error).splitlines()[0]}"


def lanes(plan: TuningPlan, num_workers: int | None = None) -> tuple[Runner, ...]:
    """Make a lane for each GPU of the cluster that this process belongs to, or of this machine."""
    try:
        import ray
    except ImportError:
        raise DeviceError(
            "--executor ray needs Ray: pip install 'sage-plugin[ray]', or leave it out"
        ) from None
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    resource = "CPU" if plan.facts.kind == "cpu" else "GPU"
    count = min(len(plan.studies), int(ray.cluster_resources().get(resource, 0)))
    if not count:
        raise DeviceError(f"the Ray cluster has no {resource}")
    needs = {"num_cpus": 1} if resource == "CPU" else {"num_gpus": 1}
    actor = ray.remote(**needs)(RayLane).options(max_restarts=-1)
    actors = [actor.remote(plan.request.timeout_s, num_workers) for _ in range(count)]
    for facts in ray.get([one.facts.remote() for one in actors]):
        if facts.slug != plan.facts.slug:
            raise UsageError(
                f"--executor ray: a machine has {facts.name}, this one {plan.facts.name}: configs "
                "of different devices are tuned apart"
            )
    return tuple(RayRunner(ray, one) for one in actors)


def _lost(study: Study, config: AnyLaunch, stage: str, why: str) -> Trial:
    return Trial(study.id, config, stage, "crashed", reason=why)
