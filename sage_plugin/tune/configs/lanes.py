"""What a session runs on: one lane for each GPU, and compile processes in front of them all."""

from __future__ import annotations

from sage_plugin import device as devices
from sage_plugin import settings
from sage_plugin.device import Gpu
from sage_plugin.errors import UsageError
from sage_plugin.tune.configs import subprocess_runner
from sage_plugin.tune.configs.compile_pool import CompilePool, default_workers
from sage_plugin.tune.configs.plan import TuningPlan
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run.runner import Runner


def chosen_gpus(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs of `all` or `0,1`, which are of one kind."""
    every = devices.gpus()
    if text == "all":
        found = every
    else:
        words = [word.strip() for word in text.split(",")]
        known = {str(gpu.index): gpu for gpu in every}
        for word in words:
            if word not in known:
                raise UsageError(
                    f"--gpus {text!r}: {word!r} is not all or one of {', '.join(known)}"
                )
        found = tuple(known[word] for word in words)
    kinds = dict.fromkeys(devices.facts(gpu.index).slug for gpu in found)
    if len(kinds) > 1:
        raise UsageError(
            f"--gpus {text}: {' and '.join(kinds)} have configs of their own: tune each kind apart"
        )
    return found


def lanes(plan: TuningPlan, num_workers: int | None = None) -> tuple[Runner, ...]:
    """Make the lanes of a plan, one for each of its GPUs; the first has the compile processes."""
    log = plan.run_folder / run_folder.LOG
    timeout_s = plan.request.timeout_s
    pool = None
    if plan.facts.kind != "cpu" and not settings.triton_interpreted():
        pool = CompilePool(num_workers or default_workers(), timeout_s=timeout_s, log=log)
    pinned: list[str | None] = [gpu.uuid for gpu in plan.request.gpus] or [None]
    return tuple(
        subprocess_runner.SubprocessRunner(timeout_s=timeout_s, log=log, pool=pool, gpu=gpu)
        for gpu in pinned
    )
