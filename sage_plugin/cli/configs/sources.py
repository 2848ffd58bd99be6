"""What commands take as tuned configs: a file, a folder of configs, or the folder of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sage_plugin.cli.console import say
from sage_plugin.errors import UsageError
from sage_plugin.schema import RegistryFile

if TYPE_CHECKING:
    from sage_plugin.registry.merge import MergeReport


def files_of(path: Path) -> list[RegistryFile]:
    """Read all tuned configs of a path; the name of a run in `tuning_runs` is one too."""
    from sage_plugin.registry import load
    from sage_plugin.registry.validate import registry_files
    from sage_plugin.tune.configs.plan import RUNS
    from sage_plugin.tune.held import results

    for folder in (path, RUNS / path):
        if results.is_run(folder):
            return [results.read(folder)]
    return [load.read(file) for file in registry_files(path)]


def merged_into(root: Path, sources: list[RegistryFile], min_gain: float) -> int:
    """Merge files into a folder of configs by the rules, and print what became of each entry."""
    from sage_plugin.registry import load
    from sage_plugin.registry.merge import merge

    changed = 0
    for file in sources:
        path = load.file_path(root, file.device.slug, file.family)
        report = merge(
            path,
            file.entries,
            family=file.family,
            facts=file.device,
            toolchain=file.toolchain,
            min_gain=min_gain,
        )
        _say_report(path, report)
        changed += len(report.added) + len(report.replaced)
    return changed


def destination(config_dir: Path | None) -> Path:
    """The folder of configs that is written to: the one that was named, or the user's."""
    from sage_plugin.registry import load

    root = config_dir or load.user_dir()
    if root is None:
        raise UsageError("no folder for configs: install platformdirs, or give --config-dir")
    return root.expanduser()


def _say_report(path: Path, report: MergeReport) -> None:
    from sage_plugin.families import describe_key
    from sage_plugin.registry.merge import ALREADY_THERE

    groups = {"added": report.added, "replaced": report.replaced, "kept": report.kept}
    counts = ", ".join(f"{len(notes)} {word}" for word, notes in groups.items())
    say(f"{path}: {counts}")
    for word, notes in groups.items():
        told = [(key, why) for key, why in notes if why != ALREADY_THERE]
        say(*(f"  {word}: {describe_key(key)}: {why}" for key, why in told))
