"""Calls of a model that is not loaded: options that derive them from its configuration."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.options import DrawnInputOptions, dtype_name, given_of, lengths
from sage_plugin.errors import UsageError
from sage_plugin.schema import GROUPED_LINEAR

if TYPE_CHECKING:
    from sage_plugin.cli.linear_options import LinearCallOptions, LinearOptions
    from sage_plugin.plugin.plan.model_calls import CallWishes
    from sage_plugin.replay.inputs import ReplayInputs

WITH_MODEL = ("--seq-len", "--batch-size", "--dtype", "--inputs-distribution")
"""Options of shapes that change what is derived from a model."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """A model by its configuration, and how many devices share its calls."""

    model: Annotated[
        Path | None,
        typer.Option(help="config.json or folder of a model: tune the calls that it makes."),
    ] = None
    image_size: Annotated[
        str | None, typer.Option(metavar="WxH", help="Pixels that the model draws, as 832x480.")
    ] = None
    num_frames: Annotated[int | None, typer.Option(help="Frames that the model draws.")] = None
    tp_size: Annotated[int, typer.Option(help="Devices that share a call: its part is tuned.")] = 1
    tp_split_dim: Annotated[
        str, typer.Option(help="What they share: heads or seq; of linears out (default) or in.")
    ] = "heads"

    def inputs(self, drawn: DrawnInputOptions) -> list[ReplayInputs]:
        """Return the inputs to draw: the model's calls, or the shapes that are spelt out."""
        from sage_plugin.plugin.plan.model_calls import local_shape

        found = self._of_model(drawn) if self.model is not None else self._spelt_out(drawn)
        return [
            dataclasses.replace(one, shape=local_shape(one.shape, self.tp_size, self.tp_split_dim))
            for one in found
        ]

    def linears(self, whole: LinearCallOptions) -> LinearOptions:
        """Return the linears that one of the devices has."""
        model = self.model if whole.op == GROUPED_LINEAR else None
        self.refuse(whole.op, model)
        split = "out" if self.tp_split_dim == "heads" else self.tp_split_dim
        return whole.on(self.tp_size, split, model)

    def refuse(self, op: str, model: Path | None = None) -> None:
        """Refuse what is attention's alone, but for a model that the op family knows too."""
        for name in ("model", "image_size", "num_frames"):
            if getattr(self, name) not in (None, model):
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} belongs to attention: leave it out, or --op {op}")

    def wishes(self, drawn: DrawnInputOptions) -> CallWishes:
        """Return what is asked of the model."""
        from sage_plugin.plugin.plan.model_calls import CallWishes

        if self.num_frames is not None and self.num_frames < 1:
            raise UsageError(f"--num-frames {self.num_frames}: must be at least 1")
        return CallWishes(
            tuple(lengths(drawn.seq_len)) if drawn.seq_len else (),
            self._pixels(),
            self.num_frames,
            drawn.batch_size,
            None if drawn.dtype is None else dtype_name(drawn.dtype),
        )

    def refuse_with_captures(self) -> None:
        """Refuse what would change captures, which are replayed as they are."""
        for option in given_of(self):
            raise UsageError(f"{option} does not change captures: leave it out, or the captures")

    def _of_model(self, drawn: DrawnInputOptions) -> list[ReplayInputs]:
        from sage_plugin.families import ATTENTION
        from sage_plugin.plugin.plan.model_calls import calls_of, read_config

        assert self.model is not None
        if wrong := [option for option in drawn.given() if option not in WITH_MODEL]:
            raise UsageError(f"--model has its own shapes: leave {wrong[0]} out")
        if drawn.batch_size is not None and drawn.batch_size < 1:
            raise UsageError(f"-b {drawn.batch_size}: must be at least 1")
        calls = calls_of(read_config(self.model), self.wishes(drawn))
        return drawn.drawn((f"{c.kind} {ATTENTION.describe(c.shape)}", c.shape) for c in calls)

    def _spelt_out(self, drawn: DrawnInputOptions) -> list[ReplayInputs]:
        for name, value in (("image_size", self.image_size), ("num_frames", self.num_frames)):
            if value is not None:
                raise UsageError(f"--{name.replace('_', '-')} is of a model: add --model FOLDER")
        return drawn.inputs()

    def _pixels(self) -> tuple[int, int] | None:
        if self.image_size is None:
            return None
        match = re.fullmatch(r"(\d{1,6})[x×](\d{1,6})", self.image_size.strip())
        if match is None:
            raise UsageError(f"--image-size {self.image_size!r}: pixels such as 832x480")
        return int(match[1]), int(match[2])
