"""`sage policy sensitivity`: what a clip loses when one layer and step range is quantized."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.clips import ClipOptions, labels
from sage_plugin.cli.console import progress, say, stdout
from sage_plugin.cli.options import (
    ConfigDir,
    Device,
    Kernels,
    StepRanges,
    flattened,
    named_kernels,
    shown_first,
)
from sage_plugin.cli.tables import Column, fitted
from sage_plugin.demo.sizes import SIZES
from sage_plugin.errors import UsageError

if TYPE_CHECKING:
    from sage_plugin.tune.policy.sensitivity_file import Sensitivities

Output = Annotated[Path, typer.Option("--output", "-o", help="File of sensitivities.")]


EXAMPLES = ("sage policy sensitivity --kernel fav3_fp8",)


@shown_first("kernel", "step_ranges", "output")
@flattened
def command(
    clip: ClipOptions,
    kernel: Kernels = None,
    step_ranges: StepRanges = 5,
    device: Device = None,
    config_dir: ConfigDir = None,
    output: Output = Path("sensitivity.json"),
) -> None:
    """Draw a clip per layer and step range, and write how far each is from the baseline."""
    from sage_plugin import device as devices
    from sage_plugin import files
    from sage_plugin.bench.clips.sensitivity import measure_sensitivity
    from sage_plugin.plugin.policy.step_range import equal_bands
    from sage_plugin.tune.policy.sensitivity_file import SCHEMA_VERSION, Sensitivities, Sensitivity

    where, facts = devices.chosen(device)
    (name, *more) = labels(named_kernels(kernel or (), facts))
    if more or not kernel:
        got = ", ".join(kernel or ()) or "none"
        raise UsageError(
            f"--kernel: got {got}, and sensitivity is measured with one kernel, better a coarse "
            "one: give --kernel fav3_fp8"
        )
    _check_output(output)
    equal_bands(step_ranges, None)  # an impossible number is refused before anything is drawn
    steps = clip.num_inference_steps or SIZES[clip.size_on(where)].default_steps
    with progress("loading the model") as report:
        subject = clip.subject(where, steps, config_dir)
        found = measure_sensitivity(subject, name, step_ranges=step_ranges, report_progress=report)
    cells = tuple(Sensitivity(*one) for one in found)
    measured = Sensitivities(SCHEMA_VERSION, name, cells)
    files.write_json(output, measured.to_json())
    _show(measured)
    say(f"Wrote {output}. Next: sage policy search --sensitivity {shlex.quote(str(output))}")


def _check_output(path: Path) -> None:
    from sage_plugin.bench.report import check_writable
    from sage_plugin.errors import ConfigError
    from sage_plugin.tune.policy import sensitivity_file

    check_writable(path)
    if path.exists() and path.stat().st_size:
        try:
            sensitivity_file.read(path)
        except ConfigError as error:
            sentence = f"--output {path}: exists and is not a file of sensitivities; name another"
            raise UsageError(sentence) from error


def _show(measured: Sensitivities) -> None:
    """PSNR of the clips, a row per layer and a column per step range."""
    levels: dict[str, dict[str, str]] = {}
    for one in measured.cells:
        level = "inf" if one.rmse == 0 else f"{-20 * math.log10(one.rmse):.1f}"
        levels.setdefault(one.layer, {})[one.steps] = level
    columns: list[Column[str]] = [
        (steps or "all", lambda layer, steps=steps: levels[layer][steps])  # type: ignore[misc]
        for steps in dict.fromkeys(one.steps for one in measured.cells)
    ]
    say(f"PSNR in dB with one layer and step range alone on {measured.kernel}")
    for part in fitted(list(levels), ("layer", str), [columns], stdout.width, padding=1):
        stdout.print(part)
