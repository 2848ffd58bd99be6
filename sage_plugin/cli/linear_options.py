"""Options that spell out linears: their shapes, number formats, and what parallelism leaves."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.options import (
    DEFAULT_FOLDER,
    DrawnInputOptions,
    ShapeOptions,
    dtype_name,
    given_of,
    lengths,
    one_of,
)
from sage_plugin.errors import UsageError
from sage_plugin.paged_records import PAGED_ATTENTION
from sage_plugin.schema import ATTENTION, GROUPED_LINEAR, LINEAR, LinearShape

if TYPE_CHECKING:
    from sage_plugin.replay.inputs import ReplayInputs

KERNELS = {"fp8": "fp8_row", "int8": "int8_row", "bf16": "bf16"}
"""The kernel that multiplies numbers of a format."""

OPS = (ATTENTION, LINEAR, GROUPED_LINEAR, PAGED_ATTENTION)
"""Op families that --op names."""

PANEL = "Linears (--op linear)"


@dataclass(frozen=True, slots=True)
class LinearCallOptions:
    """Linears as options spell them, whole; `None` for what was not given."""

    op: Annotated[str, typer.Option(help=f"One of {', '.join(OPS)} (default {ATTENTION}).")] = (
        ATTENTION
    )
    out_in_features: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OUT/IN", help="Features, as 12288/3072,3072/12288.", rich_help_panel=PANEL
        ),
    ] = None
    batch_sizes: Annotated[
        list[str] | None,
        typer.Option(help="Rows of the input, as 16,4608.", rich_help_panel=PANEL),
    ] = None
    groups: Annotated[
        int | None,
        typer.Option(min=1, help="Weights of a grouped linear.", rich_help_panel=PANEL),
    ] = None
    x_q_dtype: Annotated[
        str | None, typer.Option(help="Of the input: fp8, int8 or bf16.", rich_help_panel=PANEL)
    ] = None
    w_q_dtype: Annotated[
        str | None, typer.Option(help="Of the weight, the same.", rich_help_panel=PANEL)
    ] = None

    def given(self) -> list[str]:
        """List the options of linears that were given, by their names."""
        return given_of(self, "op")

    @property
    def chosen(self) -> bool:
        """Whether linears are asked for."""
        op = one_of("--op", self.op, OPS)
        if op != GROUPED_LINEAR and self.groups is not None:
            raise UsageError("--groups belongs to grouped linears: add --op grouped_linear")
        if op not in (ATTENTION, PAGED_ATTENTION):
            return True
        shared = {"--tp-size"} if op == PAGED_ATTENTION else set()
        if given := [option for option in self.given() if option not in shared]:
            way = "leave it out" if op == PAGED_ATTENTION else "add --op linear"
            raise UsageError(f"{given[0]} belongs to linears: {way}")
        return False

    def draws(self, recorded: Path | None) -> bool:
        """Return whether inputs are drawn, of shapes that are spelt out; else captures are read.

        Args:
            recorded: a folder of captures that was asked for, `None` where none was.
        """
        spelling = ("--out-in-features", "--batch-sizes", "--model")
        shapes = [name for name in spelling if name in self.given()]
        if shapes and recorded is not None:
            raise UsageError(f"{shapes[0]} draws inputs: leave it out, or the captures {recorded}")
        return bool(shapes) or (recorded is None and not DEFAULT_FOLDER.exists())

    def kernels(self) -> tuple[str, ...]:
        """Return the kernel that the number formats name; none without them."""
        formats = [f for f in (self.x_q_dtype, self.w_q_dtype) if f is not None]
        for option, value in (("--x-q-dtype", self.x_q_dtype), ("--w-q-dtype", self.w_q_dtype)):
            if value is not None:
                one_of(option, value, tuple(KERNELS))
        if len(set(formats)) > 1:
            raise UsageError(
                f"--x-q-dtype {formats[0]} with --w-q-dtype {formats[1]}: products here are of two "
                "numbers of one format; give both the same"
            )
        return tuple(KERNELS[f] for f in formats[:1])

    def on(self, tp_size: int, tp_split_dim: str, model: Path | None = None) -> LinearOptions:
        """Return the linears of one of several devices."""
        own = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return LinearOptions(**own, tp_size=tp_size, tp_split_dim=tp_split_dim, model=model)


@dataclass(frozen=True, slots=True)
class LinearOptions(LinearCallOptions):
    """Linears as options spell them, and how many devices share each."""

    tp_size: Annotated[
        int, typer.Option(min=1, help="Devices that share a linear.", rich_help_panel=PANEL)
    ] = 1
    tp_split_dim: Annotated[
        str, typer.Option(help="What they share: out (default) or in.", rich_help_panel=PANEL)
    ] = "out"
    model: Annotated[
        Path | None,
        typer.Option(
            help="config.json or folder of a mixture, for its experts.", rich_help_panel=PANEL
        ),
    ] = None

    def inputs(self, drawn: DrawnInputOptions) -> list[ReplayInputs]:
        """Return the inputs to draw."""
        from sage_plugin.families import describe
        from sage_plugin.families.grouped_linear.routing import SKEWED

        grouped = (SKEWED,) if self.op == GROUPED_LINEAR else ()
        return drawn.drawn(((describe(shape), shape) for shape in self.shapes(drawn)), *grouped)

    def shapes(self, others: ShapeOptions) -> list[LinearShape]:
        """Return the shapes that are spelt out, of the dtype that is shared with attention."""
        if self.model is not None:
            return self._of_experts(self.model, others)
        shared = ("--dtype", "--inputs-distribution")
        if other := [option for option in others.given() if option not in shared]:
            raise UsageError(f"{other[0]} belongs to attention: leave it out, or --op {self.op}")
        if not self.out_in_features or not self.batch_sizes:
            raise UsageError(
                f"--op {self.op} needs captures (sage capture --op {self.op} records them), or "
                "--out-in-features OUT/IN and --batch-sizes ROWS, as --out-in-features 12288/3072 "
                "--batch-sizes 16,4608"
            )
        if self.op == GROUPED_LINEAR and self.groups is None:
            raise UsageError("--op grouped_linear needs --groups, as --groups 128")
        dtype = dtype_name(others.dtype or "bf16")
        shapes = [
            LinearShape(rows, channels, out, dtype, groups=self.groups or 0)
            for out, channels in self._features()
            for rows in lengths(self.batch_sizes, "--batch-sizes")
        ]
        return list(dict.fromkeys(shapes))

    def _of_experts(self, model: Path, others: ShapeOptions) -> list[LinearShape]:
        """Shapes of a mixture's experts, for tokens of batches and lengths."""
        from sage_plugin.plugin.plan.expert_calls import expert_shapes
        from sage_plugin.plugin.plan.model_calls import read_config

        if self.op != GROUPED_LINEAR:
            raise UsageError("--model has linears of experts alone: --op grouped_linear")
        if wrong := [one for one in ("--out-in-features", "--groups") if one in self.given()]:
            raise UsageError(f"--model has its own shapes: leave {wrong[0]} out")
        if not (self.batch_sizes or others.seq_len):
            raise UsageError("--model needs tokens: --batch-sizes, --seq-len or both")
        batches = lengths(self.batch_sizes or ["1"], "--batch-sizes")
        tokens = [batch * seq for batch in batches for seq in lengths(others.seq_len or ["1"])]
        dtype = dtype_name(others.dtype or "bf16")
        shapes = expert_shapes(read_config(model), tokens, dtype, self.tp_size)
        return list(dict.fromkeys(shapes))

    def _features(self) -> list[tuple[int, int]]:
        """Local features of one device: output and input of each pair."""
        split = one_of("--tp-split-dim", self.tp_split_dim, ("out", "in"))
        found = []
        for text in (pair for one in self.out_in_features or () for pair in one.split(",")):
            parts = text.strip().split("/")
            if len(parts) != 2:
                raise UsageError(f"--out-in-features {text!r}: pairs as OUT/IN, such as 12288/3072")
            out, channels = (lengths([part], "--out-in-features")[0] for part in parts)
            whole = out if split == "out" else channels
            if whole % self.tp_size:
                raise UsageError(
                    f"--tp-size {self.tp_size} does not divide {split} features {whole} of {text}"
                )
            local = whole // self.tp_size
            found.append((local, channels) if split == "out" else (out, local))
        return found
