"""`sage bench --effects`: what a clip of the embedded model feels of each layer and band."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from sage_plugin.cli.bench_policy import Ask, progress_line, size_of, subject_of
from sage_plugin.cli.call_shape import checked_seed
from sage_plugin.cli.console import stdout
from sage_plugin.demo.sizes import SIZES
from sage_plugin.errors import UsageError

if TYPE_CHECKING:
    from sage_plugin.accuracy.effects import Effects


def run(ask: Ask, kernels: tuple[str, ...], bands: int, path: Path) -> None:
    """Draw a clip for each layer and band, show how far each is from the host's, and write.

    Raises:
        UsageError: not one kernel, or a file that is something else.
        OutputError: the file cannot be written.
    """
    from sage_plugin.bench.end_to_end.effects import measure_effects
    from sage_plugin.bench.report import write

    checked_seed(ask.seed)
    if len(kernels) != 1:
        raise UsageError(
            "--effects measures with one kernel, better a coarse one: add --kernel fav3_fp8"
        )
    _check_output(path)
    size = SIZES[size_of(ask)]
    steps = ask.steps or size.default_steps
    with progress_line() as tell:
        tell("loading the model")
        subject = subject_of(ask, size, steps)
        effects = measure_effects(subject, ask.kernels[0], bands=bands, tell=tell)
    write(path, json.dumps(effects.to_json(), indent=1) + "\n")
    _show(effects)
    sentence = f"Wrote {path}. Next: sage tune --policy --effects {shlex.quote(str(path))}"
    stdout.print(sentence, markup=False, highlight=False, soft_wrap=True)


def _check_output(path: Path) -> None:
    from sage_plugin.accuracy import effects
    from sage_plugin.bench.report import check_writable
    from sage_plugin.errors import ConfigError

    check_writable(path)
    if path.exists() and path.stat().st_size:
        try:
            effects.read(path)
        except ConfigError as error:
            raise UsageError(
                f"--effects {path}: exists and is no file of effects; name another"
            ) from error


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
