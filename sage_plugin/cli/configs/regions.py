"""`sage configs regions`: the calls that each config may serve, priced by the times of runs."""

from __future__ import annotations

from typing import Annotated

import typer

from sage_plugin.cli.configs.sources import Runs, destination
from sage_plugin.cli.console import say
from sage_plugin.cli.options import ConfigDir
from sage_plugin.errors import UsageError, number_of
from sage_plugin.schema import ATTENTION

MaxLoss = Annotated[float, typer.Option(min=0, help="Loss that a region may have; 0.01 is 1 %.")]
Fewest = Annotated[
    bool, typer.Option("--fewest", help="Drop the entries that the others' regions cover.")
]


def command(
    run: Runs, config_dir: ConfigDir = None, max_loss: MaxLoss = 0.01, fewest: Fewest = False
) -> None:
    """Price winners at the other lengths and batches of the runs, and write what they serve."""
    from sage_plugin.families import describe_key
    from sage_plugin.registry import load
    from sage_plugin.registry.entries import ranges
    from sage_plugin.registry.merge import price
    from sage_plugin.tune.configs.plan import RUNS
    from sage_plugin.tune.held import runs

    folders = [path if runs.is_run(path) else RUNS / path for path in run]
    facts, times = runs.times_of(folders)
    families = {key.family for key in times}
    if len(families) > 1:
        raise UsageError(f"runs of one op family are needed, got {', '.join(sorted(families))}")
    family = families.pop() if families else ATTENTION
    path = load.file_path(destination(config_dir), facts.slug, family)
    changed = price(path, times, limit=max_loss, drop=fewest)
    entries = {entry.key: entry for entry in load.read(path).entries}
    for key in changed:
        if key not in entries:
            say(f"dropped: {describe_key(key)}")
            continue
        spans = {name: f"{low} to {high}" for name, (low, high) in ranges(entries[key]).items()}
        heads = f", batch x heads {spans['batch_heads']}" if "batch_heads" in spans else ""
        served = spans[key.LENGTHS[0]] + heads
        say(f"{describe_key(key)}: {served}, at most {entries[key].regret:.1%} lost")
    say(f"{path}: {number_of(len(changed), 'entry', 'entries')} changed, {len(entries)} are held")
    say("Next: sage configs explain, for a length between")
