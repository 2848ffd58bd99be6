"""Options of `sage tune`: what is searched and how long, and where it runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.options import METHOD_NAMES, method_name
from sage_plugin.errors import UsageError

if TYPE_CHECKING:
    from sage_plugin.device import Gpu
    from sage_plugin.tune.configs.plan import TuningPlan
    from sage_plugin.tune.configs.space_file import SpaceFile
    from sage_plugin.tune.run.runner import Runner
    from sage_plugin.tune.search.search import ErrorLimit, SearchLimits

SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What is searched, and what may win."""

    space: Annotated[
        Path | None,
        typer.Option("--space", "--config-file", help="JSON object of lists to search."),
    ] = None
    min_gain: Annotated[
        float, typer.Option(help="Smallest sure gain worth an entry; 0.01 is 1 %.")
    ] = 0.01
    max_error_ratio: Annotated[
        float, typer.Option(help="A winner's error over the default's, at most.")
    ] = 1.1
    max_error: Annotated[
        float | None, typer.Option(help="A winner's error (centred relative L1), at most.")
    ] = None
    timeout: Annotated[float, typer.Option(help="Seconds that one trial may take.")] = 300.0
    budget: Annotated[str | None, typer.Option(help="Time for all of it: 600, 10m or 2h.")] = None
    max_trials: Annotated[int | None, typer.Option(help="Configs to try for each call key.")] = None
    patience: Annotated[
        int | None,
        typer.Option(
            "--patience",
            "--max-configs-without-improvement",
            help="Stop after so many valid configs without a better one.",
        ),
    ] = None
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Try every config of the space.")
    ] = False
    method: Annotated[
        str | None,
        typer.Option(
            *METHOD_NAMES, help="Timing: events (default on a GPU), graph, profiler or wall."
        ),
    ] = None

    def timing_method(self) -> str | None:
        """Return how times are taken, by our name."""
        return method_name(self.method)

    def limits(self) -> SearchLimits:
        """Return when a search ends."""
        from sage_plugin.tune.search.search import SearchLimits

        budget_s = None if self.budget is None else seconds(self.budget)
        return SearchLimits(self.max_trials, self.patience, budget_s, self.exhaustive)

    def error_limit(self) -> ErrorLimit:
        """Return how inexact a winner may be."""
        from sage_plugin.tune.search.search import ErrorLimit

        return ErrorLimit(self.max_error_ratio, self.max_error)

    def space_file(self, family: str) -> SpaceFile | None:
        """Return the user's own space."""
        from sage_plugin.tune.configs import space_file

        return None if self.space is None else space_file.read(self.space, family)


@dataclass(frozen=True, slots=True)
class PlaceOptions:
    """Where a session runs: lanes, compile processes, parts of it elsewhere."""

    num_workers: Annotated[
        int | None,
        typer.Option(min=1, help="Compile processes (default: by cores); none on a CPU."),
    ] = None
    gpus: Annotated[str | None, typer.Option(help="Share the calls among GPUs: all, or 0,1.")] = (
        None
    )
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Tune part I of N of the calls.")
    ] = None
    executor: Annotated[
        str, typer.Option(help="local, or ray: a lane for each GPU of a Ray cluster.")
    ] = "local"

    def part(self) -> tuple[int, int]:
        """Return which part of how many is tuned."""
        if self.shard is None:
            return 1, 1
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", self.shard.strip())
        if match is None:
            raise UsageError(f"--shard {self.shard!r}: write it as 1/4")
        return int(match[1]), int(match[2])

    def chosen_gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs that share the calls; empty for the one of `--device`."""
        if self.gpus is None:
            return ()
        from sage_plugin.tune.configs.lanes import chosen_gpus

        return chosen_gpus(self.gpus)

    def lanes(self, plan: TuningPlan) -> tuple[Runner, ...]:
        """Make the lanes of a plan."""
        from sage_plugin.cli.options import one_of

        if one_of("--executor", self.executor, ("local", "ray")) == "ray":
            from sage_plugin.tune.configs import ray_lanes

            return ray_lanes.lanes(plan, self.num_workers)
        from sage_plugin.tune.configs import lanes

        return lanes.lanes(plan, self.num_workers)


def seconds(text: str) -> float:
    """Read a duration such as `600`, `90s`, `10m` or `2h` in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None:
        raise UsageError(f"--budget {text!r}: a number of seconds, or such as 10m or 2h")
    value = float(match[1]) * SECONDS[match[2]]
    if value == float("inf"):
        raise UsageError("--budget: more seconds than a number holds")
    return value
