"""From the options of `sage tune` to its inputs: a capture folder, presets, or shapes spelt out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sage_plugin.cli.call_shape import call_shape, checked_seed, dtype_name, lengths, mask_name
from sage_plugin.errors import UsageError
from sage_plugin.schema import CallShape

if TYPE_CHECKING:
    from sage_plugin.tune.configs.inputs import TuningInputs

DEFAULT_FOLDER = Path("captured_inputs")
DEFAULT_BATCH, DEFAULT_HEADS, DEFAULT_HEAD_DIM = 1, 5, 128


@dataclass(frozen=True, slots=True)
class TuningInputOptions:
    """The options that choose inputs, as they were given; `None` where they were not."""

    from_captures: bool = False
    folder: Path | None = None
    presets: tuple[str, ...] = ()
    seq_len: tuple[str, ...] = ()
    seq_k: int | None = None
    batch: int | None = None
    heads_q: int | None = None
    heads_k: int | None = None
    head_dim: int | None = None
    dim_v: int | None = None
    causal: bool = False
    layout: str | None = None
    dtype: str | None = None
    distribution: str = "normal"
    seed: int = 0
    max_per_key: int = 3
    mask: str | None = None

    @property
    def sizes(self) -> tuple[object, ...]:
        """The options that spell a shape out, but for the dtype."""
        numbers = (self.seq_k, self.batch, self.heads_q, self.heads_k, self.head_dim, self.dim_v)
        return (*numbers, self.layout, self.causal or None, self.seq_len or None)


def inputs_of(asked: TuningInputOptions) -> TuningInputs:
    """The inputs: exactly one of captures, presets and shapes.

    Raises:
        UsageError: none of them, options that exclude each other, or a value that is not allowed.
        CaptureError: a folder without usable captures.
    """
    from sage_plugin.tune.configs.inputs import from_captures

    checked_seed(asked.seed)
    spelt = any(size is not None for size in asked.sizes)
    if not asked.from_captures:
        if asked.folder is not None:
            raise UsageError(f"to tune on captures, say --from-captures {asked.folder}")
        return _synthetic(asked, spelt)
    if spelt or asked.presets or asked.dtype is not None or asked.mask is not None:
        raise UsageError(
            "--from-captures takes its shapes from the captures: leave --preset, --dtype, --mask "
            "and the sizes out"
        )
    return from_captures(asked.folder or DEFAULT_FOLDER, max_per_key=asked.max_per_key)


def _synthetic(asked: TuningInputOptions, spelt: bool) -> TuningInputs:
    from sage_plugin.measure.inputs import DISTRIBUTIONS, presets
    from sage_plugin.tune.configs.inputs import from_shapes

    if asked.distribution not in DISTRIBUTIONS:
        raise UsageError(
            f"--inputs-distribution {asked.distribution!r}: use one of {', '.join(DISTRIBUTIONS)}"
        )
    if asked.presets and spelt:
        raise UsageError("--preset names whole shapes: leave the sizes out")
    if not asked.presets:
        return from_shapes(_shapes(asked), distribution=asked.distribution, seed=asked.seed)
    known = presets()
    unknown = [name for name in asked.presets if name not in (*known, "all")]
    if unknown:
        raise UsageError(f"--preset {unknown[0]!r}: use all or one of {', '.join(known)}")
    names = known if "all" in asked.presets else asked.presets
    mask = mask_name(asked.mask or "none")
    shapes = [dataclasses.replace(known[name], mask_kind=mask) for name in names]
    if asked.dtype is not None:
        name = dtype_name(asked.dtype)
        shapes = [dataclasses.replace(shape, dtype=name) for shape in shapes]
    return from_shapes(shapes, distribution=asked.distribution, seed=asked.seed)


def _shapes(asked: TuningInputOptions) -> list[CallShape]:
    if not asked.seq_len:
        raise UsageError(
            "nothing to tune on: give --from-captures [FOLDER], --preset NAME, or --seq-len N"
        )
    return [
        call_shape(
            batch=DEFAULT_BATCH if asked.batch is None else asked.batch,
            heads_q=DEFAULT_HEADS if asked.heads_q is None else asked.heads_q,
            heads_k=asked.heads_k,
            seq_q=length,
            seq_k=asked.seq_k,
            head_dim=DEFAULT_HEAD_DIM if asked.head_dim is None else asked.head_dim,
            dv=asked.dim_v,
            dtype=asked.dtype or "bf16",
            causal=asked.causal,
            layout=asked.layout or "bhsd",
            mask=asked.mask or "none",
        )
        for length in lengths(asked.seq_len)
    ]
