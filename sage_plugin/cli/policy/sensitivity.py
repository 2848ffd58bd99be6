"""`sage policy sensitivity`: what a clip of the embedded model feels of each layer and band."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin import files
from sage_plugin.cli.bench import ConfigDir, Device, device_of, named_kernels
from sage_plugin.cli.console import stdout
from sage_plugin.cli.policy import clips as policy_clips
from sage_plugin.cli.policy.search import Bands
from sage_plugin.demo.sizes import SIZES
from sage_plugin.errors import UsageError

if TYPE_CHECKING:
    from sage_plugin.tune.policy.effects_file import Effects

Kernels = Annotated[
    list[str] | None, typer.Option("--kernel", metavar="NAME", help="The kernel to measure with.")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="File of effects.")]


def command(
    kernel: Kernels = None,
    bands: Bands = 5,
    size: policy_clips.Size = None,
    digit: policy_clips.Digits = None,
    num_inference_steps: policy_clips.Steps = None,
    seed: policy_clips.Seed = 0,
    device: Device = None,
    config_dir: ConfigDir = None,
    output: Output = Path("effects.json"),
) -> None:
    """Draw a clip for each layer and band, and show and write how far each is from the host's."""
    from sage_plugin.bench.clips.effects import measure_effects
    from sage_plugin.tune.policy.effects_file import SCHEMA_VERSION, Effect, Effects

    where, facts = device_of(device)
    names = policy_clips.labels(named_kernels(kernel or (), facts))
    clips = policy_clips.Clips(
        where, size, tuple(digit or (7,)), num_inference_steps, seed, config_dir
    )
    if len(kernel or ()) != 1:
        got = ", ".join(kernel or ()) or "none"
        raise UsageError(
            f"--kernel: got {got}, and effects are measured with one kernel, better a coarse one: "
            "give --kernel fav3_fp8"
        )
    _check_output(output)
    steps = clips.steps or SIZES[clips.size_name()].default_steps
    with policy_clips.progress_line() as tell:
        tell("loading the model")
        found = measure_effects(clips.subject(steps), names[0], bands=bands, tell=tell)
    effects = Effects(SCHEMA_VERSION, names[0], tuple(Effect(*one) for one in found))
    files.write_json(output, effects.to_json())
    _show(effects)
    sentence = f"Wrote {output}. Next: sage policy search --effects {shlex.quote(str(output))}"
    stdout.print(sentence, markup=False, highlight=False, soft_wrap=True)


def _check_output(path: Path) -> None:
    from sage_plugin.bench.report import check_writable
    from sage_plugin.errors import ConfigError
    from sage_plugin.tune.policy import effects_file

    check_writable(path)
    if path.exists() and path.stat().st_size:
        try:
            effects_file.read(path)
        except ConfigError as error:
            sentence = f"--output {path}: exists and is no file of effects; name another"
            raise UsageError(sentence) from error


def _show(effects: Effects) -> None:
    """PSNR of the clips, a row a layer and a column a band."""
    import math

    from rich.table import Table

    bands = list(dict.fromkeys(one.steps for one in effects.effects))
    table = Table("PSNR in dB with this alone on " + effects.kernel, *(b or "all" for b in bands))
    rows: dict[str, list[str]] = {}
    for one in effects.effects:
        level = "inf" if one.rmse == 0 else f"{-20 * math.log10(one.rmse):.1f}"
        rows.setdefault(one.layer, []).append(level)
    for layer, cells in rows.items():
        table.add_row(layer, *cells)
    stdout.print(table)
