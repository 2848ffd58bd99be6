"""`sage policy smoothing`: factors that even out the outliers of linears' inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sage_plugin.cli.console import say
from sage_plugin.cli.options import DEFAULT_FOLDER
from sage_plugin.errors import UsageError

Folder = Annotated[Path, typer.Argument(help="Captures of linears.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="File of factors (safetensors).")]
Strength = Annotated[
    float, typer.Option(help="How much of the outliers moves into the weights, from 0 to 1.")
]

EXAMPLES = ("sage policy smoothing captured_inputs -o smoothing.safetensors",)


def command(
    folder: Folder = DEFAULT_FOLDER,
    output: Output = Path("smoothing.safetensors"),
    strength: Strength = 0.5,
) -> None:
    """Find smoothing factors of recorded linears (SmoothQuant), for patch(smoothing=...)."""
    from sage_plugin.capture.store.reader import open_captures
    from sage_plugin.plugin.linears.smoothing import read
    from sage_plugin.schema import LINEAR
    from sage_plugin.tune.policy.smoothing import smoothing_of, write

    if not 0.0 <= strength <= 1.0:
        raise UsageError(f"--strength {strength}: must be from 0 to 1")
    if output.exists():
        read(output)  # which refuses what is something else
    found = smoothing_of(open_captures(folder, LINEAR), strength)
    write(output, found.factors)
    say(*(f"note: {note}" for note in found.notes), to_stderr=True)
    say(f"Factors of {len(found.factors)} linears, which read {found.inputs} tensors.")
    say(f"Wrote {output}. Next: patch(pipe, linears='int8_row', smoothing='{output}'), or")
    say(f"sage policy search {folder} --smoothing {output} --max-error 0.03")
