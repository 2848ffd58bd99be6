"""`sage configs check`: are files of configs and policies sound, and are they of today."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from sage_plugin.cli.console import say
from sage_plugin.cli.options import ConfigDir, Device
from sage_plugin.errors import ConfigError, UsageError, number_of
from sage_plugin.schema import AnyKey, AnyLaunch, DeviceFacts

STALE, PROBLEMS = 1, 2

Place = Annotated[Path | None, typer.Argument(help="File or folder (default: all in use).")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Exit 1 if an entry was tuned with other software.")
]


def command(
    path: Place = None, device: Device = None, config_dir: ConfigDir = None, strict: Strict = False
) -> None:
    """Check files, policies too; exit 2 with one sentence for each problem."""
    from sage_plugin import device as devices
    from sage_plugin.paged_records import PAGED_ATTENTION
    from sage_plugin.plugin.policy import rules as policy

    facts = devices.chosen(device)[1]
    files = list(_files_to_check(path, facts, config_dir))
    found = [sentence for file in files for sentence in _problems_of(file, facts)]
    if found:
        say(*found)
        say(
            f"{number_of(len(found), 'problem')} in {number_of(len(files), 'file')}. Next: mend or "
            "delete what is named, tune again"
        )
        raise typer.Exit(PROBLEMS)
    names = ", ".join(map(str, files)) or "no file is in use"
    say(f"Sound: {names}.")
    stale = list(_stale([file for file in files if not policy.is_policy(file)]))
    say(*stale)
    if path is not None and policy.is_policy(path):
        served = all(rule.op == PAGED_ATTENTION for rule in policy.read(path).rules)
        door = "continuous_batching(model" if served else "patch(pipe"
        say(f'Next: sage_plugin.{door}, policy="{path}")')
    if stale:
        say("They are used all the same. Next: sage configs revalidate, which measures them again")
        if strict:
            raise typer.Exit(STALE)


def _problems_of(file: Path, facts: DeviceFacts) -> list[str]:
    """What is wrong with a file of launch configs, or with a policy."""
    from sage_plugin.families import family
    from sage_plugin.plugin.policy import rules as policy
    from sage_plugin.registry.validate import problems

    def illegal(config: AnyLaunch, key: AnyKey, facts: DeviceFacts) -> str | None:
        return family(key.family).illegal_reason(config, key, facts)

    if not policy.is_policy(file):
        return list(problems(file, facts, illegal=illegal))
    try:
        policy.read(file)
    except ConfigError as error:
        return [str(error)]
    return []


def _stale(files: Sequence[Path]) -> Iterator[str]:
    """A sentence on the entries of each file that were tuned with other software."""
    from sage_plugin import device as devices
    from sage_plugin.registry import load, staleness

    for file in files:
        entries = load.read(file).entries
        reasons = [
            staleness.changes(entry, devices.toolchain(entry.key.family)) for entry in entries
        ]
        counts = Counter(what for changes in reasons for what in changes)
        if counts:
            causes = "; ".join(f"{what} ({count})" for what, count in counts.items())
            some = sum(map(bool, reasons))
            yield f"{file}: {some} of {len(entries)} entries are stale: {causes}"


def _files_to_check(
    path: Path | None, facts: DeviceFacts, config_dir: Path | None
) -> Iterator[Path]:
    from sage_plugin.registry import load
    from sage_plugin.registry.validate import registry_files

    if path is not None:
        if config_dir is not None:
            raise UsageError("give a path or --config-dir, not both")
        folder = path.parent if path.is_file() else path
        if (folder / "manifest.jsonl").exists():
            raise UsageError(
                f"{path} holds captures, not configs; check those with "
                f"sage bench {shlex.quote(str(folder))}"
            )
        yield from registry_files(path)
        return
    yield from (file for _, file in load.files_in_use(facts.slug, config_dir))
