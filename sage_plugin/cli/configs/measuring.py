"""`sage configs revalidate` and `import`: configs are measured before they are believed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.console import say, say_left_out
from sage_plugin.cli.options import ConfigDir, Device, dtype_name, flattened, one_of
from sage_plugin.cli.tuning.options import PlaceOptions, seconds
from sage_plugin.errors import CaptureError
from sage_plugin.schema import LAYOUTS, DeviceFacts, LinearShape

if TYPE_CHECKING:
    from sage_plugin.tune.configs.plan import TuningPlan, TuningRequest
    from sage_plugin.tune.held.recheck import Believed


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """What believed configs are measured on, for how long, and where winners go."""

    captures: Annotated[
        Path | None, typer.Option("--captures", help="Recording whose calls are measured on.")
    ] = None
    config_dir: ConfigDir = None
    device: Device = None
    budget: Annotated[str | None, typer.Option(help="Time for all of it: 600, 10m or 2h.")] = None
    min_gain: Annotated[
        float, typer.Option(help="Smallest sure gain worth an entry; 0.01 is 1 %.")
    ] = 0.01
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be measured, and stop.")
    ] = False

    def measure(self, believed: Sequence[Believed], name: str) -> None:
        """Measure each config against the default, an op family after the other; keep what wins."""
        from sage_plugin.tune.held import recheck

        groups: dict[str, list[Believed]] = {}
        for one in believed:
            groups.setdefault(one.shape.family, []).append(one)
        plans, missing = [], []
        for family, own in groups.items():
            try:
                plans.append(recheck.build(own, self._request(family), name))
            except CaptureError as error:
                missing.append(error)
        if not plans:
            raise missing[0]
        say_left_out([str(error) for error in missing])
        if codes := [code for plan in plans if (code := self._follow(plan))]:
            raise typer.Exit(max(codes))

    def _request(self, family: str) -> TuningRequest:
        from sage_plugin import families
        from sage_plugin.capture.store.reader import open_captures
        from sage_plugin.tune.configs import inputs
        from sage_plugin.tune.configs.plan import TuningRequest
        from sage_plugin.tune.search.search import SearchLimits

        found = inputs.TuningInputs(())
        records = open_captures(self.captures).records if self.captures else ()
        if self.captures and any(record.shape.family == family for record in records):
            found = inputs.from_captures(self.captures, family=families.family(family))
        return TuningRequest(
            inputs=found,
            device=self.device,
            config_dir=self.config_dir,
            min_gain=self.min_gain,
            limits=SearchLimits(budget_s=None if self.budget is None else seconds(self.budget)),
        )

    def _follow(self, plan: TuningPlan) -> int:
        """Measure what a plan says; return the exit code, but for that of Ctrl-C."""
        from sage_plugin.cli import tune

        try:
            tune.follow(plan, PlaceOptions(), dry_run=self.dry_run)
        except typer.Exit as done:
            if done.exit_code == tune.INTERRUPTED:
                raise
            return done.exit_code
        return 0


Stale = Annotated[
    bool, typer.Option("--stale", help="Only entries that were tuned with other software.")
]
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


@flattened
def revalidate(options: MeasureOptions, stale: Stale = False) -> None:
    """Measure the configs in use again; what no longer beats the default loses its place."""
    from sage_plugin import device as devices

    facts = devices.chosen(options.device)[1]
    believed = list(_in_use(facts, options.config_dir, stale))
    if not believed:
        say(f"No {'stale ' if stale else ''}configs are in use on {facts.name}: nothing to measure")
        return
    options.measure(believed, "revalidate")


@flattened
def import_files(
    files: Files,
    options: MeasureOptions,
    kernel: Kernel = INT8_ATTENTION,
    dtype: Dtype = "fp16",
    layout: Layout = "bhsd",
) -> None:
    """Measure configs of other tuners' files here, and keep those that beat the default."""
    from sage_plugin.measure.inputs import self_attention
    from sage_plugin.registry import seed_files, tiling_files
    from sage_plugin.tune.held.recheck import Believed

    name = dtype_name(dtype)
    one_of("--layout", layout, LAYOUTS)
    believed = []
    for path in files:
        if tiling_files.is_tiling(path):
            believed.append(_of_tiling(path, kernel, name))
            continue
        for row in seed_files.read(path):
            plain = self_attention(row.batch, row.heads, row.seq_len, row.head_dim, dtype=name)
            shape = dataclasses.replace(plain, layout=layout)
            believed.append(Believed(kernel, shape, row.fields, str(path)))
    options.measure(believed, "import")


def _of_tiling(path: Path, kernel: str, dtype: str) -> Believed:
    """A tiling of a grouped product, of 16-bit numbers unless a kernel is named."""
    from sage_plugin.registry import tiling_files
    from sage_plugin.tune.held.recheck import Believed

    row = tiling_files.read(path)
    named = "bf16:triton" if kernel == INT8_ATTENTION else kernel
    shape = LinearShape(row.rows, row.in_features, row.out_features, dtype, groups=row.groups)
    return Believed(named, shape, row.fields, str(path))


def _in_use(facts: DeviceFacts, config_dir: Path | None, stale: bool) -> Iterator[Believed]:
    """The entries of a device that calls get, the first place's of each key."""
    from sage_plugin import device as devices
    from sage_plugin.registry import load, staleness
    from sage_plugin.tune.held.recheck import held

    seen = set()
    for _, path in load.files_in_use(facts.slug, config_dir):
        for entry in load.read(path).entries:
            if entry.key in seen:
                continue
            seen.add(entry.key)
            if not stale or staleness.changes(entry, devices.toolchain(entry.key.family)):
                yield held(entry, str(path))
