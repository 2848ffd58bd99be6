"""Clips that `sage policy` draws with the embedded model, and the options that choose them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.call_shape import checked_seed
from sage_plugin.cli.console import stderr
from sage_plugin.demo.sizes import SIZES
from sage_plugin.errors import UsageError

if TYPE_CHECKING:
    import torch

    from sage_plugin.bench.clips.draw import Frames, OnStep
    from sage_plugin.bench.clips.run import Subject

Size = Annotated[
    str | None, typer.Option(help="Of the clips: small or large (default: large on a GPU).")
]
Digits = Annotated[
    list[int] | None,
    typer.Option("--digit", min=0, max=9, help="Digit to draw, repeatable (default 7)."),
]
Steps = Annotated[
    int | None,
    typer.Option(min=1, help="Denoising steps (default: those of the search, or 15)."),
]
Seed = Annotated[int, typer.Option(help="Of the starting noise and of the order of timing.")]


@dataclass(frozen=True, slots=True)
class Clips:
    """What is drawn, and where.

    Attributes:
        device: where it runs.
        size: of the embedded model, `None` for the device's.
        digits: that are drawn, a clip each.
        steps: denoising steps, `None` for a default.
        seed: of the starting noise, and of the order of timing.
        config_dir: folder of configs that is searched first.
    """

    device: torch.device
    size: str | None
    digits: tuple[int, ...]
    steps: int | None
    seed: int
    config_dir: Path | None

    def __post_init__(self) -> None:
        """Refuse a seed that no generator takes."""
        checked_seed(self.seed)

    def size_name(self) -> str:
        """Return the size that was asked for, or the device's.

        Raises:
            UsageError: no such size.
        """
        name = self.size or ("small" if self.device.type == "cpu" else "large")
        if name not in SIZES:
            raise UsageError(f"--size {self.size!r}: allowed are {', '.join(SIZES)}")
        return name

    def subject(self, steps: int) -> Subject:
        """Load the embedded model, and say how it draws: bf16 on a GPU, fp32 on a CPU."""
        import numpy as np
        import torch

        from sage_plugin.bench.clips.run import Subject
        from sage_plugin.demo import load_pipeline

        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        pipe = load_pipeline(device=self.device, dtype=dtype)
        size = SIZES[self.size_name()]
        pipe.set_progress_bar_config(disable=True)

        def draw(on_step: OnStep) -> Frames:
            output = pipe(
                list(self.digits),
                size=size,
                num_inference_steps=steps,
                generator=torch.Generator().manual_seed(self.seed),
                output_type="np",
                callback_on_step_end=lambda _pipe, _step, _time, at: on_step(at["latents"]),
            )
            frames: Frames = np.concatenate(list(output.frames))  # the clips one after the other
            return frames

        return Subject(pipe, draw, self.device, config_dir=self.config_dir)


def labels(kernels: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Write kernels with their variants as options name them.

    Example:
        >>> labels([("sage", "auto"), ("fav2", "emulation")])
        ('sage', 'fav2:emulation')
    """
    return tuple(name if variant == "auto" else f"{name}:{variant}" for name, variant in kernels)


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is going on; yields what changes it."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda words: progress.update(task, description=words)
