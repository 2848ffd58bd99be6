"""`sage policy sensitivity`: what a clip loses when one layer and step range is quantized."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.clips import ClipOptions
from sage_plugin.cli.console import progress, say, stdout
from sage_plugin.cli.options import (
    ConfigDir,
    Device,
    Kernels,
    StepRanges,
    flattened,
    shown_first,
)
from sage_plugin.cli.tables import Column, fitted
from sage_plugin.demo.sizes import SIZES
from sage_plugin.errors import UsageError

if TYPE_CHECKING:
    from sage_plugin.tune.policy.sensitivity_file import Sensitivities

Output = Annotated[Path, typer.Option("--output", "-o", help="File of sensitivities.")]


Layers = Annotated[list[str] | None, typer.Option(help="Glob of layer paths; repeatable.")]

EXAMPLES = (
    "sage policy sensitivity --kernel fav3_fp8",
    "sage policy sensitivity --kernel fp8_row --layers '*.ff.*'",
)


@shown_first("kernel", "step_ranges", "output")
@flattened
def command(
    clip: ClipOptions,
    kernel: Kernels = None,
    step_ranges: StepRanges = 5,
    layers: Layers = None,
    device: Device = None,
    config_dir: ConfigDir = None,
    output: Output = Path("sensitivity.json"),
) -> None:
    """Draw a clip per layer and step range, and write how far each is from the baseline."""
    from sage_plugin import device as devices
    from sage_plugin import files
    from sage_plugin.bench.clips.sensitivity import measure_sensitivity
    from sage_plugin.plugin.policy.step_range import equal_bands
    from sage_plugin.tune.policy.option import Option
    from sage_plugin.tune.policy.sensitivity_file import SCHEMA_VERSION, Sensitivities, Sensitivity

    where, _ = devices.chosen(device)
    options = [Option.parse(text) for text in kernel or ()]
    names = tuple(option.name for option in options)
    each = len({option.op for option in options}) == len(options)
    if not options or not each or any(option.launch for option in options):
        got = ", ".join(option.label for option in options) or "none"
        raise UsageError(
            f"--kernel: got {got}, and sensitivity is measured with one kernel of each op, better "
            "a coarse one: give --kernel fav3_fp8, --kernel fp8_row, or both"
        )
    _check_output(output)
    equal_bands(step_ranges, None)  # an impossible number is refused before anything is drawn
    steps = clip.num_inference_steps or SIZES[clip.size_on(where)].default_steps
    with progress("loading the model") as report:
        subject = clip.subject(where, steps, config_dir)
        found = measure_sensitivity(
            subject,
            names,
            step_ranges=step_ranges,
            globs=tuple(layers or ("*",)),
            report_progress=report,
        )
    cells = tuple(Sensitivity(*one) for one in found)
    measured = Sensitivities(SCHEMA_VERSION, names[0], cells)
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
        (steps or "all", lambda layer, steps=steps: levels[layer].get(steps, ""))  # type: ignore[misc]
        for steps in dict.fromkeys(one.steps for one in measured.cells)
    ]
    names = " or ".join(dict.fromkeys(one.kernel or measured.kernel for one in measured.cells))
    say(f"PSNR in dB with one layer and step range alone on {names}")
    for part in fitted(list(levels), ("layer", str), [columns], stdout.width, padding=1):
        stdout.print(part)
