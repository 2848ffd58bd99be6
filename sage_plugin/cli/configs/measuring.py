"""`sage configs revalidate` and `import`: configs are measured before they are believed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.console import say
from sage_plugin.cli.options import SOME_FAILED, ConfigDir, Device, dtype_name, one_of
from sage_plugin.schema import LAYOUTS, CallShape, DeviceFacts, LinearShape, RegistryEntry

if TYPE_CHECKING:
    from sage_plugin.tune.configs.plan import TuningPlan
    from sage_plugin.tune.held.recheck import Believed

Captures = Annotated[
    Path | None, typer.Option("--captures", help="Recording whose calls are measured on.")
]
Stale = Annotated[
    bool, typer.Option("--stale", help="Only entries that were tuned with other software.")
]
Budget = Annotated[str | None, typer.Option(help="Time for all of it: 600, 10m or 2h.")]
MinGain = Annotated[float, typer.Option(help="Smallest sure gain worth an entry; 0.01 is 1 %.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be measured, and stop.")]
Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...", help="best_configs_*.json, or m*_k*_n*_g*.json of grouped products."
    ),
]
INT8_ATTENTION = "qk_int8"
Kernel = Annotated[str, typer.Option(help="Kernel, or kernel:variant, that they are of.")]
Dtype = Annotated[str, typer.Option(help="fp16, bf16 or fp32.")]
Layout = Annotated[str, typer.Option(help="bhsd or bshd.")]


def revalidate(
    captures: Captures = None,
    stale: Stale = False,
    config_dir: ConfigDir = None,
    device: Device = None,
    budget: Budget = None,
    min_gain: MinGain = 0.01,
    dry_run: DryRun = False,
) -> None:
    """Measure the configs in use again; what no longer beats the default loses its place."""
    from sage_plugin import device as devices

    facts = devices.chosen(device)[1]
    believed = list(_in_use(facts, config_dir, stale))
    if not believed:
        say(f"No {'stale ' if stale else ''}configs are in use on {facts.name}: nothing to measure")
        return
    _measure(believed, "revalidate", captures, config_dir, device, budget, min_gain, dry_run)


def import_files(
    files: Files,
    kernel: Kernel = INT8_ATTENTION,
    dtype: Dtype = "fp16",
    layout: Layout = "bhsd",
    captures: Captures = None,
    config_dir: ConfigDir = None,
    device: Device = None,
    budget: Budget = None,
    min_gain: MinGain = 0.01,
    dry_run: DryRun = False,
) -> None:
    """Measure configs of other tuners' files here, and keep those that beat the default."""
    from sage_plugin.registry import tiling_files

    believed = [
        one
        for path in files
        for one in (
            [_of_tiling(path, kernel, dtype_name(dtype))]
            if tiling_files.is_tiling(path)
            else _of_best_configs(
                path, kernel, dtype_name(dtype), one_of("--layout", layout, LAYOUTS)
            )
        )
    ]
    _measure(believed, "import", captures, config_dir, device, budget, min_gain, dry_run)


def _of_tiling(path: Path, kernel: str, dtype: str) -> Believed:
    """A tiling of a grouped product, of 16-bit numbers unless a kernel is named."""
    from sage_plugin.registry import tiling_files
    from sage_plugin.tune.held.recheck import Believed

    row = tiling_files.read(path)
    named = "bf16:triton" if kernel == INT8_ATTENTION else kernel
    shape = LinearShape(row.rows, row.in_features, row.out_features, dtype, groups=row.groups)
    return Believed(named, shape, row.fields, str(path))


def _of_best_configs(path: Path, kernel: str, dtype: str, layout: str) -> Iterator[Believed]:
    """Configs of attention by length."""
    from sage_plugin.registry import seed_files
    from sage_plugin.tune.held.recheck import Believed

    for row in seed_files.read(path):
        shape = CallShape(
            batch=row.batch, heads_q=row.heads, heads_k=row.heads, seq_q=row.seq_len,
            seq_k=row.seq_len, head_dim=row.head_dim, dv=row.head_dim, dtype=dtype,
            causal=False, mask_kind="none", layout=layout, scale=row.head_dim**-0.5,
        )  # fmt: skip
        yield Believed(kernel, shape, row.fields, str(path))


def _in_use(facts: DeviceFacts, config_dir: Path | None, stale: bool) -> Iterator[Believed]:
    """The entries of a device that calls get, the first place's of each key."""
    from sage_plugin import device as devices
    from sage_plugin.registry import load, staleness
    from sage_plugin.tune.held.recheck import held

    seen = set()
    for _, path in load.search_path(facts.slug, config_dir=config_dir):
        for entry in load.read(path).entries if path.exists() else ():
            if entry.key in seen or not isinstance(entry, RegistryEntry):
                continue
            seen.add(entry.key)
            if not stale or staleness.changes(entry, devices.toolchain()):
                yield held(entry, str(path))


def _measure(
    believed: Sequence[Believed],
    name: str,
    captures: Path | None,
    config_dir: Path | None,
    device: str | None,
    budget: str | None,
    min_gain: float,
    dry_run: bool,
) -> None:
    from sage_plugin.cli import tune
    from sage_plugin.cli.tuning.options import seconds
    from sage_plugin.tune.configs import inputs
    from sage_plugin.tune.configs.plan import TuningRequest
    from sage_plugin.tune.held import recheck
    from sage_plugin.tune.search.search import SearchLimits

    plan: TuningPlan = recheck.build(
        believed,
        TuningRequest(
            inputs=inputs.TuningInputs(()) if captures is None else inputs.from_captures(captures),
            device=device,
            config_dir=config_dir,
            min_gain=min_gain,
            limits=SearchLimits(budget_s=None if budget is None else seconds(budget)),
        ),
        name,
    )
    if dry_run:
        tune.show_plan(plan)
        return
    report = tune.run_plan(plan)
    tune.show_report(report)
    if report.interrupted:
        raise typer.Exit(tune.INTERRUPTED)
    if report.failed:
        raise typer.Exit(SOME_FAILED)
