"""`sage configs export`: tuned configs in the form of other tuners."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from sage_plugin import files
from sage_plugin.cli.configs.sources import As, facts_of, files_of
from sage_plugin.cli.console import command_line, say
from sage_plugin.cli.options import ConfigDir, Device, one_of
from sage_plugin.errors import UsageError, number_of
from sage_plugin.schema import AnyEntry, DeviceFacts

SEED, GMM = "seed", "gmm"

Place = Annotated[
    Path | None, typer.Argument(help="File, folder of configs, or a run (default: all in use).")
]
Format = Annotated[
    str, typer.Option("--format", help="seed: best_configs_*.json; gmm: m*_k*_n*_g*.json.")
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for the files.")]


def command(
    path: Place = None,
    form: Format = SEED,
    out: Out = Path("."),
    device: Device = None,
    card: As = None,
    config_dir: ConfigDir = None,
) -> None:
    """Write tuned configs as files of another tuner."""
    from sage_plugin.registry import seed_files, tiling_files

    one_of("--format", form, (SEED, GMM))
    facts = facts_of(device, card, config_dir)
    entries = _entries(path, facts, config_dir)
    write = tiling_files.write if form == GMM else seed_files.write
    made, left_out = write(entries, time.strftime("%Y%m%d_%H%M%S", time.gmtime()))
    if left_out:
        count = number_of(len(left_out), "entry", "entries")
        say(f"left out: {count}, which the form has no words for", to_stderr=True)
    if not made:
        count = number_of(len(entries), "entry", "entries")
        raise UsageError(f"{count} found, and none can be written in this form")
    with files.writing(out):
        out.mkdir(parents=True, exist_ok=True)
    for name, content in made.items():
        files.write_json(out / name, content)
        say(f"{out / name}: {number_of(1 if form == GMM else len(content), 'call')}")
    taken = command_line("configs", "import", out / next(iter(made)))
    say(f"Next: {taken}, on the card that shall use them")


def _entries(path: Path | None, facts: DeviceFacts, config_dir: Path | None) -> list[AnyEntry]:
    from sage_plugin.registry import load

    if path is not None:
        return [entry for file in files_of(path) for entry in file.entries]
    places = [place for _, place in load.files_in_use(facts.slug, config_dir)]
    found = [entry for place in places for entry in load.read(place).entries]
    return list({entry.key: entry for entry in reversed(found)}.values())  # the first place stands
